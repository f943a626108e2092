// SPDX-License-Identifier: Apache-2.0
#include "plugins/core/c_api/c_api.h"

#include <algorithm>
#include <charconv>
#include <cstdio>
#include <cstring>
#include <exception>
#include <memory>
#include <mutex>
#include <new>
#include <string>
#include <system_error>
#include <vector>

#include "cpu/isa.h"
#include "plugins/core/base/ascii.h"
#include "plugins/core/c_api/internal.h"
#include "plugins/core/contract/cuda_backend.h"
#include "plugins/core/contract/op.h"
#include "plugins/core/host/quoted.h"
#include "plugins/core/host/thread_pool.h"
#include "plugins/core/mask/block_mask_builder.h"
#include "plugins/core/mask/block_mask_cache.h"
#include "plugins/core/mask/expr_eval.h"
#include "stof_build_id.h"

struct stof_mask {
  stof::MaskExpr expr;
  stof::MaskParts parts;
};
struct stof_block_mask {
  stof::BlockMask mask;
};

namespace {

using stof::CheckGiven;
using stof::CheckList;
using stof::Convert;
using stof::RunGuarded;
using stof::Status;

Status ConvertNamed(const stof_operand* operands, int count, std::vector<std::pair<std::string, stof::Tensor>>* named) {
  STOF_RETURN_IF_ERROR(CheckList("operands", operands, count));
  for (int i = 0; i < count; ++i) {
    stof::Tensor tensor;
    STOF_RETURN_IF_ERROR(CheckGiven({{"name of an operand", operands[i].name}}));
    STOF_RETURN_IF_ERROR(Convert(operands[i].tensor, &tensor));
    named->emplace_back(operands[i].name, tensor);
  }
  return Status();
}

stof::ExprSizes ToSizes(const stof_sizes& s) { return {s.B, s.H, s.S, s.T, s.P}; }

class ListedAttributes final : public stof::AttributeReader {
 public:
  ListedAttributes(const stof_attribute* attributes, int count) : attributes_(attributes), count_(count) {}
  bool Int(const char* name, int64_t* value) const override {
    const stof_attribute* found = Find(name, 0);
    if (found != nullptr) *value = found->i;
    return found != nullptr;
  }
  bool Float(const char* name, float* value) const override {
    const stof_attribute* found = Find(name, 1);
    if (found != nullptr) *value = static_cast<float>(found->f);
    return found != nullptr;
  }
  bool String(const char* name, std::string* value) const override {
    const stof_attribute* found = Find(name, 2);
    if (found == nullptr) return false;
    if (found->s == nullptr) {
      SetMistyped(name, stof::AttributeType::kString);
      return false;
    }
    *value = found->s;
    return true;
  }
  bool Ints(const char* name, std::vector<int64_t>* value) const override {
    const stof_attribute* found = Find(name, 3);
    if (found == nullptr) return false;
    if (found->s == nullptr) {
      SetMistyped(name, stof::AttributeType::kInts);
      return false;
    }
    std::vector<int64_t> numbers;
    for (const std::string& word : stof::SplitWords(found->s)) {
      int64_t number = 0;
      const char* end = word.data() + word.size();
      const auto [rest, error] = std::from_chars(word.data(), end, number);
      if (error != std::errc() || rest != end) {  // no number, or one beyond 64 bits
        SetMistyped(name, stof::AttributeType::kInts);
        return false;
      }
      numbers.push_back(number);
    }
    *value = std::move(numbers);
    return true;
  }

 private:
  const stof_attribute* Find(const char* name, int type) const {
    for (int i = 0; i < count_; ++i) {
      if (std::strcmp(attributes_[i].name, name) != 0) continue;
      if (attributes_[i].type == type) return &attributes_[i];
      SetMistyped(name, static_cast<stof::AttributeType>(type));
    }
    return nullptr;
  }
  const stof_attribute* attributes_;
  int count_;
};

// Memory of one run, kept for the next run of the same thread: a benchmark would otherwise time page faults.
class Arena {
 public:
  ~Arena() {
    for (const Block& block : blocks_) ::operator delete(block.data, kAlignment);
  }
  void Reset() {
    for (Block& block : blocks_) block.used = false;
  }
  static void* Allocate(void* self, size_t bytes) {
    auto& arena = *static_cast<Arena*>(self);
    Block* best = nullptr;
    for (Block& block : arena.blocks_) {
      if (!block.used && block.bytes >= bytes && (best == nullptr || block.bytes < best->bytes)) best = &block;
    }
    if (best == nullptr) {
      const size_t rounded = (bytes + 63) / 64 * 64;
      void* data = ::operator new(std::max<size_t>(64, rounded), kAlignment, std::nothrow);
      if (data == nullptr) return nullptr;
      arena.blocks_.push_back({data, rounded, false});
      best = &arena.blocks_.back();
    }
    best->used = true;
    return best->data;
  }

 private:
  struct Block {
    void* data;
    size_t bytes;
    bool used;
  };
  static constexpr std::align_val_t kAlignment{64};
  std::vector<Block> blocks_;
};

// One pool and one arena for each calling thread, kept between calls: calls from several threads do not share them.
stof::RunContext ContextOfThisThread(int threads) {
  thread_local Arena arena;
  thread_local std::unique_ptr<stof::ThreadPool> pool;
  if (pool == nullptr || pool->view().threads != threads || pool->IsOfAnotherProcess()) {
    pool = std::make_unique<stof::ThreadPool>(threads);
  }
  arena.Reset();
  stof::RunContext context;
  context.parallel = pool->view();
  context.allocate = Arena::Allocate;
  context.self = &arena;
  return context;
}

std::string BuildInfo() {
  std::string text = "{\"version\": \"" STOF_VERSION "\", \"build_id\": \"" STOF_BUILD_ID "\", \"backends\": [\"cpu\"";
  if (stof::FindCudaBackend() != nullptr) text += ", \"cuda\"";
  text += "], \"cuda_architectures\": [" STOF_CUDA_ARCHITECTURES "], \"cpu_isa\": \"";
  text += stof::CpuIsaName(stof::BestCpuIsa());
  return text + "\", \"compiler\": \"" STOF_COMPILER "\"}";
}

}  // namespace

extern "C" {

const char* stof_build_info(void) {
  static stof::ProcessWide<const std::string> info;
  return info.Get(BuildInfo).c_str();
}

int stof_mask_create(const char* expression, const stof_operand* tables, int table_count, stof_mask** mask, char* error,
                     size_t error_size) {
  return RunGuarded(error, error_size, [&] {
    STOF_RETURN_IF_ERROR(CheckGiven({{"expression", expression}, {"mask", mask}}));
    std::vector<std::pair<std::string, stof::Tensor>> named;
    STOF_RETURN_IF_ERROR(ConvertNamed(tables, table_count, &named));
    auto made = std::make_unique<stof_mask>();
    STOF_RETURN_IF_ERROR(stof::MaskExpr::Parse(expression, named, &made->expr));
    made->parts = stof::SplitMask(made->expr);
    *mask = made.release();
    return Status();
  });
}

void stof_mask_destroy(stof_mask* mask) { delete mask; }

size_t stof_mask_print(const stof_mask* mask, char* text, size_t text_size) {
  if (mask == nullptr) return 0;
  const std::string printed = mask->expr.Print();
  if (text != nullptr && text_size > 0) std::snprintf(text, text_size, "%s", printed.c_str());
  return printed.size();
}

uint64_t stof_mask_hash(const stof_mask* mask) { return mask == nullptr ? 0 : mask->expr.Hash(); }

int stof_mask_eval(const stof_mask* mask, const stof_sizes* sizes, const stof_operand* runtime, int runtime_count,
                   uint8_t* allowed, char* error, size_t error_size) {
  return RunGuarded(error, error_size, [&] {
    STOF_RETURN_IF_ERROR(CheckGiven({{"mask", mask}, {"sizes", sizes}, {"allowed", allowed}}));
    std::vector<std::pair<std::string, stof::Tensor>> named;
    STOF_RETURN_IF_ERROR(ConvertNamed(runtime, runtime_count, &named));
    const auto& operands = mask->expr.operands();
    std::vector<stof::ExprBinding> bindings(operands.size());
    for (size_t i = 0; i < operands.size(); ++i) {
      if (operands[i]->table) continue;
      for (const auto& [name, tensor] : named) {
        if (name != operands[i]->name) continue;
        const bool byte = tensor.dtype == stof::DType::kBool || tensor.dtype == stof::DType::kU8;
        if (!byte && tensor.dtype != stof::DType::kI32 && tensor.dtype != stof::DType::kI64) {
          return Status::Error(name + " must be bool, uint8, int32 or int64");
        }
        bindings[i].data = tensor.data;
        bindings[i].dtype = tensor.dtype;
        bindings[i].rank = tensor.rank;
        std::copy(tensor.dims, tensor.dims + std::min(tensor.rank, 4), bindings[i].dims);
      }
      if (bindings[i].data == nullptr)
        return Status::Error("the mask reads " + operands[i]->name + ", which is not given");
    }
    const stof::ExprSizes s = ToSizes(*sizes);
    STOF_RETURN_IF_ERROR(mask->expr.Check(s, &bindings));
    stof::ExprEvaluator evaluator(mask->expr, s, bindings);
    for (int64_t b = 0; b < s.B; ++b) {
      for (int64_t h = 0; h < s.H; ++h) {
        for (int64_t i = 0; i < s.S; ++i) {
          evaluator.Row(b, h, s.P + i, 0, s.T, allowed + ((b * s.H + h) * s.S + i) * s.T);
        }
      }
    }
    return Status();
  });
}

int stof_block_mask_create(const stof_mask* mask, const stof_sizes* sizes, int m, int n, stof_block_mask** block_mask,
                           char* error, size_t error_size) {
  return RunGuarded(error, error_size, [&] {
    STOF_RETURN_IF_ERROR(CheckGiven({{"mask", mask}, {"sizes", sizes}, {"block_mask", block_mask}}));
    auto made = std::make_unique<stof_block_mask>();
    stof::MaskExpr fixed = mask->parts.fixed;
    if (fixed.empty()) STOF_RETURN_IF_ERROR(stof::MaskExpr::Parse("True", {}, &fixed));
    STOF_RETURN_IF_ERROR(stof::BuildBlockMask(fixed, ToSizes(*sizes), m, n, &made->mask));
    *block_mask = made.release();
    return Status();
  });
}

void stof_block_mask_destroy(stof_block_mask* block_mask) { delete block_mask; }

void stof_block_mask_get(const stof_block_mask* block_mask, stof_block_mask_view* view) {
  if (view == nullptr) return;
  *view = stof_block_mask_view();
  if (block_mask == nullptr) return;
  const stof::BlockMask& mask = block_mask->mask;
  view->S = mask.S;
  view->T = mask.T;
  view->P = mask.P;
  view->m = mask.m;
  view->n = mask.n;
  view->rows = mask.rows;
  view->layout_b = mask.layout_b;
  view->layout_h = mask.layout_h;
  view->tables = mask.rows == 0 ? 0 : static_cast<int64_t>(mask.full_begin.size()) / mask.rows;
  view->nnz = static_cast<int64_t>(mask.key_tile.size());
  view->distinct = static_cast<int64_t>(mask.bits.size()) * 32 / (static_cast<int64_t>(mask.m) * mask.n);
  view->layout = mask.layout.data();
  view->row_ptr = mask.row_ptr.data();
  view->full_begin = mask.full_begin.data();
  view->key_tile = mask.key_tile.data();
  view->bits_id = mask.bits_id.data();
  view->bits = mask.bits.data();
}

void stof_block_mask_cache_stats(int64_t stats[5], int clear) {
  auto& cache = stof::BlockMaskCache::Global();
  const auto s = cache.GetStats();
  const int64_t values[5] = {s.entries, s.bytes, s.hits, s.misses, s.builds};
  if (stats != nullptr) std::copy(values, values + 5, stats);
  if (clear != 0) cache.Clear();
}

int stof_op_create(const char* op_type, const stof_attribute* attributes, int attribute_count, stof_op** op,
                   char* error, size_t error_size) {
  return RunGuarded(error, error_size, [&] {
    STOF_RETURN_IF_ERROR(CheckGiven({{"op_type", op_type}, {"op", op}}));
    STOF_RETURN_IF_ERROR(CheckList("attributes", attributes, attribute_count));
    for (int i = 0; i < attribute_count; ++i) {
      STOF_RETURN_IF_ERROR(CheckGiven({{"name of an attribute", attributes[i].name}}));
    }
    int count = 0;
    const stof::OpDescription* const* ops = stof::AllOps(&count);
    for (int i = 0; i < count; ++i) {
      if (std::strcmp(ops[i]->name, op_type) != 0) continue;
      auto made = std::make_unique<stof_op>();
      STOF_RETURN_IF_ERROR(CreateOp(*ops[i], ListedAttributes(attributes, attribute_count), &made->op));
      *op = made.release();
      return Status();
    }
    return Status::Error("there is no operator " + stof::Quote(op_type, 64));
  });
}

void stof_op_destroy(stof_op* op) { delete op; }

int stof_op_workspace(const stof_op* op, const stof_tensor* inputs, int input_count, int threads, size_t* bytes,
                      char* error, size_t error_size) {
  return RunGuarded(error, error_size, [&] {
    STOF_RETURN_IF_ERROR(CheckGiven({{"op", op}, {"bytes", bytes}}));
    if (threads < 1 || threads > 64) return Status::Error("threads must be 1 to 64");
    std::vector<stof::Tensor> in;
    STOF_RETURN_IF_ERROR(Convert(inputs, input_count, &in));
    if (input_count < op->op->InputCount()) {
      return Status::Error("has " + std::to_string(input_count) + " inputs, expected " +
                           std::to_string(op->op->InputCount()));
    }
    return op->op->PlanHost(in.data(), input_count, threads, bytes);
  });
}

int stof_op_run(stof_op* op, const stof_tensor* inputs, int input_count, stof_tensor* outputs, int output_count,
                int threads, char* error, size_t error_size) {
  return RunGuarded(error, error_size, [&] {
    STOF_RETURN_IF_ERROR(CheckGiven({{"op", op}}));
    if (threads < 1 || threads > 64) return Status::Error("threads must be 1 to 64");
    std::vector<stof::Tensor> in;
    std::vector<stof::Tensor> out;
    STOF_RETURN_IF_ERROR(Convert(inputs, input_count, &in));
    STOF_RETURN_IF_ERROR(Convert(outputs, output_count, &out));
    return op->op->Run(in.data(), input_count, out.data(), output_count, ContextOfThisThread(threads));
  });
}

}  // extern "C"
