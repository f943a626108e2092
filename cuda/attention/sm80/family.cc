// SPDX-License-Identifier: Apache-2.0
#include <memory>

#include "cuda/attention/job.h"
#include "cuda/attention/sm80/api.h"

namespace stof {
namespace cuda {
namespace {

constexpr HeadSizeTable kTables[] = {{32, FindSm80D32},   {64, FindSm80D64},   {96, FindSm80D96},  {128, FindSm80D128},
                                     {160, FindSm80D160}, {192, FindSm80D192}, {256, FindSm80D256}};

KernelTable Find(const KernelProblem& problem) { return FindByHeadSize(kTables, problem); }

Status Run(AttentionJob* job, const KernelEntry& kernel) {
  STOF_RETURN_IF_ERROR(job->PreparePadding());
  STOF_RETURN_IF_ERROR(job->PrepareTiled());
  return CheckLaunch(kernel.code_as<Sm80Code>().launch(*job->params(), job->stream()));
}

Status Prepare(AttentionJob* job, const KernelEntry&) { return job->PrepareTiled(); }

constexpr KernelFamily MakeFamily() {
  KernelFamily family;
  family.role = KernelRole::kTiled;
  family.takes_16_bit = true;
  family.find = Find, family.run = Run, family.prepare = Prepare;
  return family;
}

}  // namespace

const KernelFamily kSm80Family = MakeFamily();

}  // namespace cuda
}  // namespace stof
