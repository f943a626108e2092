// SPDX-License-Identifier: Apache-2.0
#include "cuda/attention/job.h"
#include "cuda/attention/rowwise/api.h"

namespace stof {
namespace cuda {
namespace {

Status Prepare(AttentionJob* job, const KernelEntry& kernel) {
  MaskForm form;
  form.m = kernel.rows, form.n = kernel.keys;
  return job->GetMask(form);
}

Status Plan(AttentionJob* job, AttentionPlan* plan) {
  plan->rows = plan->kernel->rows;
  return Prepare(job, *plan->kernel);
}

Status Run(AttentionJob* job, const AttentionPlan& plan) {
  STOF_RETURN_IF_ERROR(job->PreparePadding());
  return CheckLaunch(plan.kernel->code_as<RowwiseCode>().launch(job->params(), job->stream()));
}

constexpr KernelFamily MakeFamily() {
  KernelFamily family;
  family.role = KernelRole::kRowwise;
  family.takes_16_bit = family.takes_fp32 = true;
  family.needs_aligned_rows = true;
  family.find = FindRowwise, family.plan = Plan, family.run = Run, family.prepare = Prepare;
  return family;
}

}  // namespace

const KernelFamily kRowwiseFamily = MakeFamily();

}  // namespace cuda
}  // namespace stof
