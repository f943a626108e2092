// SPDX-License-Identifier: Apache-2.0
// StofAttention before a run: plans for runtimes that plan ahead, and preparation of what a first run would make.
#include <algorithm>

#include "plugins/core/base/integers.h"
#include "plugins/core/contract/cuda_backend.h"
#include "plugins/core/contract/workspace_counter.h"
#include "plugins/core/mask/block_mask_cache.h"
#include "plugins/core/ops/attention_op.h"
#include "plugins/core/ops/attention_operands.h"

namespace stof {
namespace {

constexpr int64_t kUsualLength = 1024;  // where none is known
// Declared sizes may be huge: no tensor has to exist for them. Masks with more tables than this are left to the run,
// and, on the CPU, masks with more tiles times nodes of the expression (some seconds if every tile is evaluated).
constexpr int64_t kMostPreparedTables = int64_t{1} << 20;
constexpr int64_t kMostPreparedWork = int64_t{1} << 20;

bool AllKnown(const std::vector<Tensor>& tensors) {
  return std::all_of(tensors.begin(), tensors.end(), [](const Tensor& tensor) {
    return std::all_of(tensor.dims, tensor.dims + tensor.rank, [](int64_t dim) { return dim >= 0; });
  });
}

}  // namespace

Status AttentionOp::PlanDevice(const Tensor* inputs, int input_count, DevicePlan* plan) const {
  Problem problem;
  const Tensor* pad = nullptr;
  STOF_RETURN_IF_ERROR(BindForDevice(inputs, input_count, &problem, &pad));
  size_t copies = 0;
  if (problem.copies.given()) {
    STOF_RETURN_IF_ERROR(PlanPaddedCopies(problem.is_pad_alone(), &problem.copies, &problem.args, &pad, &copies));
  }
  const MaskExpr& fixed = problem.mask->parts.fixed;
  if (!fixed.empty()) {
    std::vector<ExprBinding> none(fixed.operands().size());
    STOF_RETURN_IF_ERROR(fixed.Check(problem.sizes, &none));
  }
  STOF_RETURN_IF_ERROR(
      PlanCudaAttention(problem.args, pad != nullptr, *problem.mask, problem.sizes, problem.given, &plan->workspace));
  plan->workspace += copies;
  // Runs of other lengths may be split by residue.
  const int64_t m = problem.mask->modulus;
  if (!problem.copies.given() && problem.args.shape.S / m >= kMinResidueLength &&
      problem.args.shape.T / m >= kMinResidueLength && m > 1) {
    AttentionArgs parts = problem.args;
    AttentionShape& shape = parts.shape;
    shape.B *= m, shape.S = CeilDiv(shape.S, m), shape.T = CeilDiv(shape.T, m);
    size_t workspace = 0;
    const ExprSizes sizes = {shape.B, shape.H, shape.S, shape.T, 0};
    if (PlanCudaAttention(parts, false, *problem.mask->of_residue, sizes, problem.given, &workspace).ok()) {
      plan->workspace = std::max(plan->workspace, workspace);
    }
  }
  // Key columns are gathered first, and relative tables expanded. The fp32 kernels split keys and values
  // into 16-bit terms first.
  plan->runs_several_kernels = pad != nullptr || !problem.mask->parts.dynamic.empty() ||
                               problem.args.shape.dtype == DType::kF32 || problem.mask->columns != nullptr ||
                               problem.args.scores.has_relative_tables();
  const CudaBackend* backend = FindCudaBackend();
  plan->kernels = backend == nullptr ? 0 : backend->attention.count_kernels(problem.args);
  return Status();
}

Status AttentionOp::PlanHost(const Tensor* inputs, int input_count, int threads, size_t* workspace) const {
  *workspace = 0;
  if (attributes_.sequences.given()) return Status::Error("only a run knows the lengths of packed sequences");
  std::vector<Tensor> given(inputs, inputs + std::max(0, input_count));
  for (size_t i = 0; i < attributes_.operands.size() && kTypedInputs + i < given.size(); ++i) {
    if (mask_.is_fixed() || !IsTableName(attributes_.operands[i]) || given[kTypedInputs + i].data != nullptr) continue;
    return Status::Error(attributes_.operands[i] + " has no data: only a run knows what the mask allows");
  }
  for (Tensor& tensor : given) {
    if (tensor.data == nullptr) tensor.data = UnreadData();
  }
  Problem problem;
  STOF_RETURN_IF_ERROR(BindQueryKeyValue(attributes_, given.data(), input_count, &problem.args));
  STOF_RETURN_IF_ERROR(Complete(given.data(), false, &problem));
  AttentionArgs& args = problem.args;
  const AttentionShape& shape = args.shape;
  if (shape.B == 0 || shape.H == 0 || shape.S == 0 || shape.T == 0) return Status();
  const Tensor* pad = nullptr;
  RunContext unread;
  unread.on_cuda = true;  // where nothing reads operands on the host
  STOF_RETURN_IF_ERROR(BindOperands(problem.mask->parts, &problem.given, unread, &args, &pad));
  STOF_RETURN_IF_ERROR(relative_.Bind(problem.given, problem.sizes, &args, &problem.relative_rows));
  const size_t pad_bytes = pad == nullptr ? 0 : static_cast<size_t>(shape.B * shape.T);
  if (pad != nullptr) args.mask.pad = static_cast<const uint8_t*>(UnreadData());
  args.output.data = UnreadData();
  problem.Split();
  const CpuAttentionConfig config = ChooseCpuAttention(args, std::max(1, threads));
  std::shared_ptr<const BlockMask> blocks;
  const MaskExpr& fixed = problem.mask->parts.fixed;
  const int64_t tiles = CeilDiv(shape.S, config.m) * CeilDiv(shape.T, config.n);  // to 2^34
  // A window needs fewer packed keys than a mask that takes long to build; of that one all are counted.
  if (!fixed.empty() && tiles <= kMostPreparedWork && shape.B * shape.H <= kMostPreparedWork / tiles) {
    const Status status = BlockMaskCache::Global().Get(fixed, problem.mask->fixed_hash, problem.sizes, config.m,
                                                       config.n, kCpuBlockMaskBounds, &blocks);
    if (status.ok()) args.mask.fixed = StaticMask::OfBlocks(blocks.get(), nullptr);
  }
  *workspace = CpuAttentionWorkspace(args, config, std::max(1, threads)) + pad_bytes;
  return Status();
}

Status AttentionOp::PrepareDevice(const Tensor* inputs, int input_count, int kernel) const {
  return PrepareDeviceFor(std::vector<Tensor>(inputs, inputs + input_count), kernel, true, false);
}

Status AttentionOp::PrepareNode(const Tensor* inputs, int input_count, bool on_cuda, int threads) {
  if (!mask_.is_fixed()) return Status();
  const std::vector<Tensor> given(inputs, inputs + input_count);
  if (AllKnown(given)) {
    return on_cuda ? PrepareDeviceFor(given, 0, true, true) : PrepareHost(inputs, input_count, threads);
  }
  if (attributes_.sequences.given()) return Status();  // usual sizes say little of lengths
  for (const int64_t length : {kUsualLength, int64_t{1}}) {
    std::vector<Tensor> sized = given;
    if (!on_cuda || !FillUnknownSizes(length, &sized)) return Status();
    STOF_RETURN_IF_ERROR(PrepareDeviceFor(sized, 0, false, false));
  }
  return Status();
}

Status AttentionOp::BindForDevice(const Tensor* inputs, int input_count, Problem* problem, const Tensor** pad) const {
  STOF_RETURN_IF_ERROR(BindQueryKeyValue(attributes_, inputs, input_count, &problem->args));
  STOF_RETURN_IF_ERROR(problem->copies.Bind(attributes_, inputs, &problem->args));
  STOF_RETURN_IF_ERROR(Complete(inputs, true, problem));
  RunContext context;
  context.on_cuda = true;
  STOF_RETURN_IF_ERROR(BindOperands(problem->mask->parts, &problem->given, context, &problem->args, pad));
  return relative_.Bind(problem->given, problem->sizes, &problem->args, &problem->relative_rows);
}

Status AttentionOp::PrepareHost(const Tensor* inputs, int input_count, int threads) {
  if (attributes_.sequences.given()) return Status();  // only a run knows their lengths
  Problem problem;
  STOF_RETURN_IF_ERROR(BindQueryKeyValue(attributes_, inputs, input_count, &problem.args));
  STOF_RETURN_IF_ERROR(Complete(inputs, false, &problem));
  if (attributes_.operands.empty() && !attributes_.lse) problem.Split();
  AttentionArgs& args = problem.args;
  std::shared_ptr<const ColumnSource::Gathered> gathered;
  if (attributes_.operands.empty() && CanGatherColumns(*problem.mask, args, &gathered)) {
    problem.mask = gathered->mask;
    args.shape.T = problem.sizes.T = args.shape.T + gathered->columns->packed();
  }
  if (problem.mask->parts.fixed.empty() || args.shape.B * args.shape.H * args.shape.T == 0 ||
      args.shape.S <= kUncachedRows || args.shape.B * args.shape.H > kMostPreparedTables) {
    return Status();
  }
  const CpuAttentionConfig config = ChooseCpuAttention(args, std::max(1, threads));
  const MaskExpr& fixed = problem.mask->parts.fixed;
  const int64_t tables = (fixed.Uses(ExprOp::kB) ? args.shape.B : 1) * (fixed.Uses(ExprOp::kH) ? args.shape.H : 1);
  const int64_t tiles = CeilDiv(args.shape.S, config.m) * CeilDiv(args.shape.T, config.n);  // to 2^34
  if (tiles > kMostPreparedWork || tables * tiles * static_cast<int64_t>(fixed.nodes().size()) > kMostPreparedWork) {
    return Status();
  }
  prepared_.sizes = problem.sizes;
  prepared_.hash = problem.mask->fixed_hash;
  prepared_.config = config;
  const Status status =
      BlockMaskCache::Global().GetToKeep(problem.mask->parts.fixed, problem.mask->fixed_hash, problem.sizes,
                                         prepared_.config.m, prepared_.config.n, kCpuBlockMaskBounds, &prepared_.mask);
  return status.too_large() ? Status() : status;  // a run evaluates it tile by tile
}

bool AttentionOp::FillUnknownSizes(int64_t length, std::vector<Tensor>* tensors) const {
  const auto set = [](Tensor* tensor, int axis, int64_t value) {
    if (axis < tensor->rank && tensor->dims[axis] < 0) tensor->dims[axis] = value;
    return axis < tensor->rank ? tensor->dims[axis] : value;
  };
  int64_t lengths[kTypedInputs] = {length, kUsualLength, kUsualLength}, batch = 1;
  for (size_t i = 0; i < tensors->size(); ++i) {
    Tensor& tensor = (*tensors)[i];
    if (tensor.rank > 0 && tensor.dims[0] < 0) tensor.dims[0] = i < kTypedInputs ? batch : 1;
    if (i < kTypedInputs) {
      if (i == 0) batch = tensor.rank > 0 ? tensor.dims[0] : 1;
      lengths[i] = set(&tensor, attributes_.layout[i] == TensorLayout::kBHSD ? 2 : 1, lengths[i]);
      if (i == 1 && attributes_.query_offset) lengths[1] = std::max(lengths[1], lengths[0]);
      continue;
    }
    const std::string& role = attributes_.operands[i - kTypedInputs];
    if (role == "pad" || role == "segment_k") set(&tensor, 1, lengths[1]);
    if (role == "segment_q") set(&tensor, 1, lengths[0]);
    if (role == "relative_bias_factor") set(&tensor, 1, 1), set(&tensor, 2, lengths[0]);
    if (IsRelativeRole(role)) set(&tensor, 1, kUsualLength);
    if (role == "bias") {
      for (int axis = 1; axis < tensor.rank; ++axis) set(&tensor, axis, 1);
    }
  }
  return AllKnown(*tensors);
}

Status AttentionOp::PrepareDeviceFor(std::vector<Tensor> inputs, int kernel, bool known, bool keep) const {
  for (Tensor& tensor : inputs) tensor.data = UnreadData();
  Problem problem;
  const Tensor* pad = nullptr;
  STOF_RETURN_IF_ERROR(BindForDevice(inputs.data(), static_cast<int>(inputs.size()), &problem, &pad));
  const CudaBackend* backend = FindCudaBackend();
  if (backend == nullptr) return Status::Error(kNoCudaKernels);
  AttentionArgs& args = problem.args;
  if (args.shape.B == 0 || args.shape.H == 0 || args.shape.S == 0 || args.shape.T == 0)
    return Status();  // nothing is computed
  if (args.shape.B * args.shape.H > kMostPreparedTables) return Status();
  args.output.data = UnreadData();
  size_t copies = 0;
  if (problem.copies.given())
    STOF_RETURN_IF_ERROR(PlanPaddedCopies(problem.is_pad_alone(), &problem.copies, &args, &pad, &copies));
  if (known && !attributes_.lse) problem.Split();
  RunContext context;
  context.on_cuda = true;
  context.kernel = kernel;
  if (keep) context.keeper = &keeper_;
  if (known) return backend->attention.prepare(args, pad, *problem.mask, problem.sizes, problem.given, context);
  // Without the static mask: it would be made for sizes that no run may have.
  AttentionMask mask;
  mask.parts.dynamic = problem.mask->parts.dynamic;
  mask.parts.pad = problem.mask->parts.pad;
  const int kernels = args.shape.S > 1 ? backend->attention.count_kernels(args) : 0;
  for (context.kernel = kernels > 0 ? 1 : 0; context.kernel <= kernels; ++context.kernel) {
    STOF_RETURN_IF_ERROR(backend->attention.prepare(args, pad, mask, problem.sizes, problem.given, context));
  }
  return Status();
}

}  // namespace stof
