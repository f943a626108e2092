// SPDX-License-Identifier: Apache-2.0
// The C ABI where it is used wrongly: an error that says so.
#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <locale>
#include <string>
#include <vector>

#include "plugins/core/base/types.h"
#include "plugins/core/c_api/c_api.h"
#include "tests/cpp/check.h"

namespace stof::test {
namespace {

char error[256];

// Whether a call failed with a message that has `part`.
bool Refused(int result, const char* part) { return result == 1 && std::strstr(error, part) != nullptr; }

stof_tensor TensorOf(void* data, DType dtype, const std::vector<int64_t>& dims) {
  stof_tensor tensor = {data, static_cast<int32_t>(dtype), static_cast<int32_t>(dims.size()), {}};
  std::copy(dims.begin(), dims.end(), tensor.dims);
  return tensor;
}

// An operator that is destroyed with the test.
struct OwnedOp {
  explicit OwnedOp(const char* type, const std::vector<stof_attribute>& attributes = {}) {
    const int result =
        stof_op_create(type, attributes.data(), static_cast<int>(attributes.size()), &op, error, sizeof error);
    CHECK(result == 0, error);
  }
  OwnedOp(const OwnedOp&) = delete;
  OwnedOp& operator=(const OwnedOp&) = delete;
  ~OwnedOp() { stof_op_destroy(op); }
  stof_op* op = nullptr;
};

stof_attribute TextOf(const char* name, const char* text) { return {name, 2, 0, 0, text}; }

TEST(CApiRefusesMasks) {
  stof_mask* mask = nullptr;
  stof_block_mask* blocks = nullptr;
  const stof_sizes sizes = {1, 1, 4, 4, 0};
  uint8_t allowed[16], table[4] = {1, 1, 1, 1};
  stof_operand operand = {"table0", TensorOf(table, DType::kBool, {4})};
  const auto create = [&](const char* text, const stof_operand* tables, int count, stof_mask** to) {
    return stof_mask_create(text, tables, count, to, error, sizeof error);
  };
  CHECK(Refused(create(nullptr, nullptr, 0, &mask), "expression is a null pointer"));
  CHECK(Refused(create("k <= q", nullptr, 0, nullptr), "mask is a null pointer"));
  CHECK(Refused(create("k <= q", nullptr, 1, &mask), "operands is a null pointer"));
  CHECK(Refused(create("k <= q", &operand, -1, &mask), "a negative number of operands"));
  operand.tensor.rank = 9;
  CHECK(Refused(create("table0[k]", &operand, 1, &mask), "rank 9"));
  operand.tensor = TensorOf(nullptr, DType::kBool, {4});
  CHECK(Refused(create("table0[k]", &operand, 1, &mask), "table0 has no data"));
  operand.name = nullptr;
  CHECK(Refused(create("table0[k]", &operand, 1, &mask), "name of an operand is a null pointer"));
  CHECK(mask == nullptr);
  CHECK(create("pad[b, k]", nullptr, 0, &mask) == 0, error);

  const auto eval = [&](const stof_mask* of, const stof_sizes* s, const stof_operand* list, int count, uint8_t* to) {
    return stof_mask_eval(of, s, list, count, to, error, sizeof error);
  };
  CHECK(Refused(eval(nullptr, &sizes, nullptr, 0, allowed), "mask is a null pointer"));
  CHECK(Refused(eval(mask, nullptr, nullptr, 0, allowed), "sizes is a null pointer"));
  CHECK(Refused(eval(mask, &sizes, nullptr, 0, nullptr), "allowed is a null pointer"));
  CHECK(Refused(eval(mask, &sizes, nullptr, 0, allowed), "reads pad, which is not given"));
  operand = {"pad", TensorOf(table, DType::kBool, {4})};
  CHECK(Refused(eval(mask, &sizes, &operand, 1, allowed), "not of rank 2"));
  operand.tensor = TensorOf(table, DType::kBool, {1, 3});
  CHECK(Refused(eval(mask, &sizes, &operand, 1, allowed), "index 1 of pad runs from 0 to 3, expected 0 to 2"));
  const stof_sizes negative = {1, 1, -4, 4, 0};
  CHECK(Refused(eval(mask, &negative, &operand, 1, allowed), "a size of -4"));

  const auto build = [&](const stof_mask* of, const stof_sizes* s, int m, stof_block_mask** to) {
    return stof_block_mask_create(of, s, m, 64, to, error, sizeof error);
  };
  CHECK(Refused(build(nullptr, &sizes, 32, &blocks), "mask is a null pointer"));
  CHECK(Refused(build(mask, nullptr, 32, &blocks), "sizes is a null pointer"));
  CHECK(Refused(build(mask, &sizes, 32, nullptr), "block_mask is a null pointer"));
  CHECK(Refused(build(mask, &sizes, -1, &blocks), "a tile of -1"));
  CHECK(stof_mask_create("k <=", nullptr, 0, &mask, nullptr, 0) == 1, "an error that nobody reads");

  // Functions without an error.
  stof_block_mask_view view = {};
  view.rows = 7;
  stof_block_mask_get(nullptr, &view);
  CHECK(view.rows == 0 && view.row_ptr == nullptr);
  stof_block_mask_get(nullptr, nullptr);
  stof_block_mask_cache_stats(nullptr, 0);
  CHECK(stof_mask_print(nullptr, nullptr, 0) == 0 && stof_mask_hash(nullptr) == 0);
  stof_mask_destroy(mask);
  stof_mask_destroy(nullptr);
  stof_block_mask_destroy(nullptr);
  CountCases(24);
}

TEST(CApiRefusesOperators) {
  stof_op* op = nullptr;
  const auto create = [&](const char* type, const stof_attribute* attributes, int count, stof_op** to) {
    return stof_op_create(type, attributes, count, to, error, sizeof error);
  };
  CHECK(Refused(create(nullptr, nullptr, 0, &op), "op_type is a null pointer"));
  CHECK(Refused(create("StofAttention", nullptr, 0, nullptr), "op is a null pointer"));
  CHECK(Refused(create("StofAttention", nullptr, 2, &op), "attributes is a null pointer"));
  CHECK(Refused(create("StofAttention", nullptr, -2, &op), "a negative number of attributes"));
  CHECK(Refused(create("\x1bStof", nullptr, 0, &op), "there is no operator '\\x1bStof'"));
  stof_attribute attribute = TextOf(nullptr, "k <= q");
  CHECK(Refused(create("StofAttention", &attribute, 1, &op), "name of an attribute is a null pointer"));
  attribute = TextOf("mask", nullptr);
  CHECK(Refused(create("StofAttention", &attribute, 1, &op), "attribute mask is of another type"));
  attribute.type = 99;
  CHECK(Refused(create("StofAttention", &attribute, 1, &op), "attribute mask is of another type"));
  CHECK(op == nullptr);
  stof_op_destroy(nullptr);

  float data[16] = {}, result[16];
  stof_tensor inputs[3], output = TensorOf(result, DType::kF32, {1, 1, 4, 4});
  for (stof_tensor& input : inputs) input = TensorOf(data, DType::kF32, {1, 1, 4, 4});
  const OwnedOp attention("StofAttention");
  const auto run = [&](stof_op* of, const stof_tensor* list, int count, stof_tensor* to, int threads) {
    return stof_op_run(of, list, count, to, 1, threads, error, sizeof error);
  };
  CHECK(run(attention.op, inputs, 3, &output, 1) == 0, error);
  CHECK(Refused(run(nullptr, inputs, 3, &output, 1), "op is a null pointer"));
  CHECK(Refused(run(attention.op, nullptr, 3, &output, 1), "tensors is a null pointer"));
  CHECK(Refused(run(attention.op, inputs, 3, nullptr, 1), "tensors is a null pointer"));
  CHECK(Refused(run(attention.op, inputs, -3, &output, 1), "a negative number of tensors"));
  CHECK(Refused(run(attention.op, inputs, 2, &output, 1), "has 2 inputs"));
  CHECK(Refused(run(attention.op, inputs, 3, &output, 0), "threads must be 1 to 64"));
  CHECK(Refused(run(attention.op, inputs, 3, &output, 65), "threads must be 1 to 64"));
  static const char* const kMissing[] = {"query has no data", "key has no data", "value has no data"};
  for (int i = 0; i < 3; ++i) {
    inputs[i].data = nullptr;
    CHECK(Refused(run(attention.op, inputs, 3, &output, 1), kMissing[i]));
    inputs[i].data = data;
  }
  output.data = nullptr;
  CHECK(Refused(run(attention.op, inputs, 3, &output, 1), "output has no data"));
  output.data = result;
  output.dims[2] = 5;
  CHECK(Refused(run(attention.op, inputs, 3, &output, 1), "output has shape [1, 1, 5, 4]"));
  output.dims[2] = -4;
  CHECK(Refused(run(attention.op, inputs, 3, &output, 1), "a negative dimension"));
  const stof_attribute both = TextOf("results", "lse");
  const OwnedOp logs("StofAttention", {both});
  output.dims[2] = 4;
  stof_tensor outputs[2] = {output, TensorOf(nullptr, DType::kF32, {1, 1, 4})};
  // Runtimes leave out a second output that nobody wants.
  CHECK(stof_op_run(logs.op, inputs, 3, outputs, 2, 1, error, sizeof error) == 0, error);
  outputs[1].data = data;
  CHECK(stof_op_run(logs.op, inputs, 3, outputs, 2, 1, error, sizeof error) == 0, error);
  CHECK(Refused(stof_op_prepare(nullptr, inputs, 3, error, sizeof error), "op is a null pointer"));
  CHECK(Refused(stof_op_prepare(attention.op, nullptr, 3, error, sizeof error), "tensors is a null pointer"));
  CHECK(Refused(stof_gemm_form(nullptr, 0, nullptr, 0, error, sizeof error), "no epilogue"));
  CHECK(Refused(stof_gemm_cpu_form("", 3, nullptr, 0, error, sizeof error), "attribute pair is 3"));

  // Operands, each where its mask reads it.
  const OwnedOp padded("StofAttention", {TextOf("mask", "pad[b, k]"), TextOf("operands", "pad")});
  stof_tensor all[4] = {inputs[0], inputs[1], inputs[2], TensorOf(nullptr, DType::kBool, {1, 4})};
  output.dims[2] = 4;
  CHECK(Refused(run(padded.op, all, 4, &output, 1), "pad has no data"));

  // Only shapes are read for a workspace, but tables: the mask depends on them.
  size_t bytes = 1;
  const auto measure = [&](const OwnedOp& of, int threads) {
    return stof_op_workspace(of.op, all, 4, threads, &bytes, error, sizeof error);
  };
  for (stof_tensor& tensor : all) tensor.data = nullptr;
  CHECK(measure(padded, 1) == 0, error);
  CHECK(bytes > 0);
  CHECK(Refused(measure(padded, 65), "threads must be 1 to 64"));
  const OwnedOp tabled("StofAttention", {TextOf("mask", "table0[k] == 1"), TextOf("operands", "table0")});
  all[3] = TensorOf(nullptr, DType::kU8, {4});
  CHECK(Refused(measure(tabled, 1), "table0 has no data"));
  all[3].data = data;
  CHECK(measure(tabled, 1) == 0, error);
  // Sizes whose product is 2^64.
  for (int i = 0; i < 3; ++i) all[i] = TensorOf(nullptr, DType::kF32, {16, 65536, int64_t{1} << 22, int64_t{1} << 22});
  all[3] = TensorOf(nullptr, DType::kBool, {16, int64_t{1} << 22});
  CHECK(measure(padded, 1) != 0 || bytes > 0, error);
  CountCases(30);
}

// The Python tests parse it and compare every number with docs/reference/c-api.md.
// A locale in which a blank is a letter, and what is beyond ASCII, too: what a program sets must not change what
// attributes mean.
class Letters : public std::ctype<char> {
 public:
  Letters() : std::ctype<char>(Table()) {}

 private:
  static const mask* Table() {
    static const std::vector<mask> table(table_size, alpha);
    return table.data();
  }
};

TEST(CApiReadsAttributesInAnyLocale) {
  const std::locale before = std::locale::global(std::locale(std::locale::classic(), new Letters));
  {
    const OwnedOp attention("StofAttention", {TextOf("mask", "k <= q and q - k < 7"),
                                              TextOf("layout", "BSN BSN BSN BSN"),
                                              {"num_heads", 0, 4, 0, nullptr},
                                              {"kv_num_heads", 0, 4, 0, nullptr},
                                              {"packed", 3, 0, 0, "0 12\t4 12 8 12"}});
    CHECK(attention.op != nullptr);
  }
  stof_op* op = nullptr;
  for (const char* numbers : {"0 12 4 12 8 12x", "0 12 4 12 8 99999999999999999999", "0,12"}) {
    const stof_attribute packed = {"packed", 3, 0, 0, numbers};
    CHECK(Refused(stof_op_create("StofAttention", &packed, 1, &op, error, sizeof error), "packed"));
  }
  std::locale::global(before);
  CountCases(4);
}

TEST(CApiListsLimits) {
  const char* const text = stof_op_limits();
  CHECK(text == stof_op_limits());
  const std::string all = text;
  for (const char* part :
       {"{\"StofAttention\": {\"activations\": [], \"activations_with_zeros\": [], \"attributes\": [\"mask\", "
        "\"mask_id\"",
        "\"packed\"", "\"roles\": [\"pad\", \"bias\"",
        "\"targets\": {\"cpu\": {\"types\": {\"1\": {\"largest_head_size\": 256, \"head_size_multiple_of\": 1, ",
        "\"relative_tables\": 4, \"most_relative_value_rows\": 1024}, \"10\"",
        "\"10\": {\"largest_head_size\": 256, \"head_size_multiple_of\": 8, \"most_heads\": 65536, "
        "\"most_length\": 4194304, \"most_operands\": 18, \"relative_tables\": 3}, \"16\"",
        "\"tensorrt\": {\"types\": {\"1\": {\"largest_head_size\": 256",
        "\"StofChain\": {\"activations\": [], \"activations_with_zeros\": [], \"attributes\": [\"chain\", "
        "\"chain_id\"], \"roles\": [], \"storage_types\": [], "
        "\"targets\": {\"cpu\": {}, \"cuda\": {}, ",
        "\"cuda\": {\"types\": {\"10\": {}, \"16\": {}}}"}) {
    CHECK(all.find(part) != std::string::npos, part, " is not in ", all);
  }
  CHECK(std::count(all.begin(), all.end(), '{') == std::count(all.begin(), all.end(), '}'), all);
  CountCases(8);
}

// Nothing is thrown across the border, and no thread is left behind.
TEST(CApiSurvivesWithoutMemory) {
  CHECK(stof_read_bandwidth(1, SIZE_MAX, 0) == 0);
#if !defined(__SANITIZE_ADDRESS__) && !defined(STOF_THREAD_SANITIZER)  // which reserve address space for themselves
  float data[16] = {}, result[16];
  stof_tensor inputs[3], output = TensorOf(result, DType::kF32, {1, 1, 4, 4});
  for (stof_tensor& input : inputs) input = TensorOf(data, DType::kF32, {1, 1, 4, 4});
  const OwnedOp attention("StofAttention");
  long pages = 0;
  std::FILE* const file = std::fopen("/proc/self/statm", "r");
  CHECK(file != nullptr && std::fscanf(file, "%ld", &pages) == 1);
  std::fclose(file);
  rlimit before, few;
  CHECK(getrlimit(RLIMIT_AS, &before) == 0);
  few = before;
  few.rlim_cur =
      static_cast<rlim_t>(pages * sysconf(_SC_PAGESIZE)) + (rlim_t{100} << 20);  // for some threads, and not for 64
  CHECK(setrlimit(RLIMIT_AS, &few) == 0);
  constexpr size_t kBeyond = size_t{1} << 30;
  void* const beyond = mmap(nullptr, kBeyond, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (beyond != MAP_FAILED) {  // an emulator, which accepts a limit and does not keep it
    munmap(beyond, kBeyond);
    std::printf("  address space has no limit here: threads without memory are not checked\n");
    return CountCases(1);
  }
  const int failed = stof_op_run(attention.op, inputs, 3, &output, 1, 64, error, sizeof error);
  const double rate = stof_fma_rate(64, 0);
  setrlimit(RLIMIT_AS, &before);
  CHECK(Refused(failed, "of 64 threads"), error);
  CHECK(rate == 0, rate);
  CHECK(stof_op_run(attention.op, inputs, 3, &output, 1, 2, error, sizeof error) == 0, error);
#endif
  CountCases(4);
}

}  // namespace
}  // namespace stof::test
