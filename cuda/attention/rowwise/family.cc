// SPDX-License-Identifier: Apache-2.0
#include <memory>

#include "cuda/attention/job.h"
#include "cuda/attention/rowwise/api.h"

namespace stof {
namespace cuda {
namespace {

Status Prepare(AttentionJob* job, const KernelEntry& kernel) {
  MaskForm form;
  form.m = kernel.rows, form.n = kernel.keys;
  std::shared_ptr<const MaskEntry> entry;
  return job->GetMask(form, job->params(), &entry);
}

Status Run(AttentionJob* job, const KernelEntry& kernel) {
  STOF_RETURN_IF_ERROR(job->PreparePadding());
  STOF_RETURN_IF_ERROR(Prepare(job, kernel));
  return CheckLaunch(kernel.code_as<RowwiseCode>().launch(*job->params(), job->stream()));
}

constexpr KernelFamily MakeFamily() {
  KernelFamily family;
  family.role = KernelRole::kRowwise;
  family.takes_16_bit = family.takes_fp32 = true;
  family.needs_aligned_rows = true;
  family.find = FindRowwise, family.run = Run, family.prepare = Prepare;
  return family;
}

}  // namespace

const KernelFamily kRowwiseFamily = MakeFamily();

}  // namespace cuda
}  // namespace stof
