// SPDX-License-Identifier: Apache-2.0
// Kernels made for chains, as far as no device is needed: their source, and what is kept of them on disk.
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <set>
#include <string>
#include <thread>
#include <tuple>
#include <vector>

#include "cuda/chain/codegen.h"
#include "cuda/chain/disk_cache.h"
#include "cuda/chain/prebuilt.h"
#include "plugins/core/contract/op.h"
#include "tests/cpp/check.h"

namespace stof::test {
namespace {

struct Planned {
  cuda::ChainLayout layout;
  cuda::ChainPlan plan;
};

// The plan for tensors at multiples of 256, or `off` bytes behind one.
Planned Plan(const std::string& text, const std::vector<Tensor>& inputs, uintptr_t off = 0) {
  Chain chain;
  BoundChain bound;
  Status status = ParseChain(text, &chain);
  if (status.ok()) status = BindChain(chain, inputs.data(), static_cast<int>(inputs.size()), &bound);
  CHECK(status.ok(), text, ": ", status.message());
  const void* from[kChainMostInputs];
  void* to[kChainMostOutputs];
  for (const void*& data : from) data = reinterpret_cast<const void*>(uintptr_t{1} << 40 | off);
  for (void*& data : to) data = reinterpret_cast<void*>(uintptr_t{1} << 41 | off);
  Planned planned;
  CHECK(cuda::MakeChainLayout(chain, bound, from, to, 132, &planned.layout), text);
  cuda::MakeChainPlan(chain, planned.layout, 132, &planned.plan);
  return planned;
}

std::string Norm(const std::string& b, const std::string& s, const std::string& n, const std::string& r) {
  const std::string at = "[" + b + ", " + s + ", " + n + "]";
  return "axes " + b + " = x0.0, " + s + " = x0.1, " + n + " = x0.2\nlet " + r + " = x0" + at + " + x1" + at +
         "\nout y0 f16 " + at + " = (" + r + " - mean(" + r + ")) * rsqrt(mean(" + r + " * " + r + ") + 1e-5) * x2[" +
         n + "]";
}

TEST(ChainSourceHasNoWordOfTheText) {
  const std::vector<Tensor> inputs = {TensorOfShape(DType::kF16, {2, 9, 768}), TensorOfShape(DType::kF16, {2, 9, 768}),
                                      TensorOfShape(DType::kF16, {768})};
  const std::string plain = Plan(Norm("b", "s", "n", "r"), inputs).plan.kernel;
  const std::string hostile = Plan(Norm("system", "asm_volatile", "include", "printf_"), inputs).plan.kernel;
  CHECK(plain == hostile, "the names of a description change the source");
  CHECK(hostile.find("printf_") == std::string::npos && hostile.find("asm_volatile") == std::string::npos,
        "a name of the description stands in the source");
  CountCases(2);
}

// One kernel serves all batches and lengths.
TEST(ChainSourceServesManyShapes) {
  std::string source;
  for (const auto& [b, s] : std::vector<std::pair<int64_t, int64_t>>{{1, 2}, {1, 128}, {3, 7}, {8, 512}, {16, 2048}}) {
    const Tensor x = TensorOfShape(DType::kF16, {b, s, 768});
    const Planned planned = Plan(Norm("b", "s", "n", "r"), {x, x, TensorOfShape(DType::kF16, {768})});
    if (source.empty()) source = planned.plan.kernel;
    CHECK(planned.plan.kernel == source, "another source for (", b, ", ", s, ")");
    CHECK(planned.layout.axes == 2 && planned.layout.vector == 8 && planned.layout.lanes == 32, "another layout");
    CHECK(planned.plan.ctas * (planned.plan.threads / 32) >= b * s, "rows without a warp");
    CountCases(1);
  }
}

TEST(ChainAccessesAreAligned) {
  for (const auto& [off, n, vector] : std::vector<std::tuple<uintptr_t, int64_t, int>>{
           {0, 768, 8}, {8, 768, 4}, {4, 768, 2}, {2, 768, 1}, {0, 100, 4}, {0, 101, 1}, {0, 1, 1}}) {
    const Tensor x = TensorOfShape(DType::kF16, {4, 5, n});
    const Planned planned = Plan(Norm("b", "s", "n", "r"), {x, x, TensorOfShape(DType::kF16, {n})}, off);
    CHECK(planned.layout.vector == vector, "rows of ", n, " at ", off, ": ", planned.layout.vector, " neighbours");
    CountCases(1);
  }
  // A select at a column that no vector may cross.
  for (const auto& [at, vector] : std::vector<std::pair<int64_t, int>>{{32, 8}, {36, 4}, {33, 1}}) {
    const std::string half = std::to_string(at);
    const Planned planned =
        Plan("axes s = x0.0, n = x0.1; out y0 f16 [s, n] = select(n < " + half + ", x0[s, n], x1[s, n - " + half + "])",
             {TensorOfShape(DType::kF16, {4, 64}), TensorOfShape(DType::kF16, {4, 64})});
    CHECK(planned.layout.vector <= vector, "a select at ", at, ": ", planned.layout.vector, " neighbours");
    CountCases(1);
  }
}

// What the build compiles is what would be made for a model's chain.
TEST(ChainUsualKernels) {
  for (const DType dtype : {DType::kF16, DType::kBF16, DType::kF32}) {
    const std::vector<std::string> kernels = cuda::UsualChainKernels(dtype);
    CHECK(kernels.size() > 50 && kernels.size() < 150, kernels.size(), " kernels");
    const std::string type = dtype == DType::kF16 ? "f16" : dtype == DType::kBF16 ? "bf16" : "f32";
    // Another epsilon, another length, sizes that are written out.
    const std::string text =
        "axes a = x0.0, b = x0.1, n = 768\nlet t0 = x0[a, b, n] + x1[a, b, n]\nlet t1 = t0 - "
        "mean(t0)\nout y0 " +
        type + " [a, b, n] = t1 * rsqrt(mean(t1 * t1) + 1e-12) * x2[n] + x3[n]";
    const Tensor x = TensorOfShape(dtype, {8, 77, 768}), w = TensorOfShape(dtype, {768});
    const std::string kernel = Plan(text, {x, x, w, w}).plan.kernel;
    CHECK(std::find(kernels.begin(), kernels.end(), kernel) != kernels.end(), "no kernel for\n", text);
    CountCases(1);
  }
}

class Folder {
 public:
  Folder() {
    char path[] = "/tmp/stof-chains-XXXXXX";
    if (mkdtemp(path) == nullptr) throw Failure{"no folder for a test"};
    path_ = path;
  }
  Folder(const Folder&) = delete;
  Folder& operator=(const Folder&) = delete;
  ~Folder() {
    if (std::system(("rm -rf " + path_).c_str()) != 0) std::printf("  %s stays\n", path_.c_str());
  }
  const std::string& path() const { return path_; }
  // Of all files.
  std::set<std::string> Names() const {
    std::set<std::string> names;
    for (const auto& entry : std::filesystem::directory_iterator(path_)) names.insert(entry.path().filename().string());
    return names;
  }
  // The one entry of it.
  std::string Entry() const {
    const std::string list = path_ + ".list";
    if (std::system(("ls " + path_ + " > " + list).c_str()) != 0) throw Failure{"no list"};
    std::string name;
    std::ifstream(list) >> name;
    unlink(list.c_str());
    return path_ + "/" + name;
  }

 private:
  std::string path_;
};

std::string Bytes(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return std::string(std::istreambuf_iterator<char>(file), {});
}
void SetBytes(const std::string& path, const std::string& bytes) {
  std::ofstream(path, std::ios::binary | std::ios::trunc) << bytes;
}

TEST(ChainCacheKeepsAndChecks) {
  const Folder folder;
  const std::string key = "a key\nof lines", code("code\0with\xff zeros", 16);
  std::string got;
  CHECK(!cuda::LoadCachedChain(folder.path(), key, &got), "an entry out of nothing");
  CHECK(cuda::StoreCachedChain(folder.path(), key, code), "nothing was kept");
  CHECK(cuda::LoadCachedChain(folder.path(), key, &got) && got == code, "not what was kept");
  CHECK(!cuda::LoadCachedChain(folder.path(), key + "x", &got), "the entry of another key");
  const std::string entry = folder.Entry(), whole = Bytes(entry);
  for (size_t i = 0; i < whole.size(); ++i) {
    std::string damaged = whole;
    damaged[i] = static_cast<char>(damaged[i] ^ 0x10);
    SetBytes(entry, damaged);
    CHECK(!cuda::LoadCachedChain(folder.path(), key, &got), "byte ", i, " does not matter");
    SetBytes(entry, whole.substr(0, i));
    CHECK(!cuda::LoadCachedChain(folder.path(), key, &got), "an entry cut at ", i);
    CountCases(2);
  }
  SetBytes(entry, whole + "x");
  CHECK(!cuda::LoadCachedChain(folder.path(), key, &got), "an entry that goes on");
  CHECK(cuda::StoreCachedChain(folder.path(), key, code) && cuda::LoadCachedChain(folder.path(), key, &got),
        "a damaged entry is not written again");
  // One that others may write, and a link.
  chmod(entry.c_str(), 0622);
  CHECK(!cuda::LoadCachedChain(folder.path(), key, &got), "an entry that others may write");
  const Folder other;
  SetBytes(other.path() + "/whole", whole);
  chmod((other.path() + "/whole").c_str(), 0600);
  unlink(entry.c_str());
  CHECK(symlink((other.path() + "/whole").c_str(), entry.c_str()) == 0, "no link");
  CHECK(!cuda::LoadCachedChain(folder.path(), key, &got), "a link");
  CountCases(8);
}

TEST(ChainCacheFolderIsTheUsersOwn) {
  const Folder folder;
  std::string got;
  const std::string shared = folder.path() + "/shared", link = folder.path() + "/link", deep = folder.path() + "/a/b/c";
  mkdir(shared.c_str(), 0700);
  CHECK(cuda::StoreCachedChain(shared, "key", "code"), "nothing was kept");
  CHECK(symlink(shared.c_str(), link.c_str()) == 0, "no link");
  CHECK(!cuda::StoreCachedChain(link, "key", "code") && !cuda::LoadCachedChain(link, "key", &got),
        "a link to a folder");
  for (const mode_t mode : {0755, 0770, 0701}) {
    chmod(shared.c_str(), mode);
    CHECK(!cuda::StoreCachedChain(shared, "key", "code") && !cuda::LoadCachedChain(shared, "key", &got),
          "a folder of mode ", mode);
  }
  CHECK(cuda::StoreCachedChain(deep, "key", "code") && cuda::LoadCachedChain(deep, "key", &got),
        "folders are not made");
  struct stat state;
  CHECK(stat(deep.c_str(), &state) == 0 && (state.st_mode & 0777) == 0700, "a folder that others see");
  CHECK(!cuda::StoreCachedChain("", "key", "code") && !cuda::StoreCachedChain("a/b", "key", "code"),
        "no absolute path");
  CountCases(7);
}

// Of a folder that is full the oldest entries go, and what a process left half written; never a file of the user's.
TEST(ChainCacheFolderIsLimited) {
  const Folder folder;
  const std::string code(1000, 'c'), mine = folder.path() + "/notes", half = "." + std::string(32, '0') + ".1.2";
  constexpr int64_t kMost = 8000;
  SetBytes(mine, std::string(20000, 'm'));
  SetBytes(folder.path() + "/" + half, std::string(3000, 'h'));
  const auto set_age = [&](const std::string& name, int seconds) {
    struct stat state;
    CHECK(stat((folder.path() + "/" + name).c_str(), &state) == 0, name);
    const struct timespec times[2] = {{state.st_mtime - seconds, 0}, {state.st_mtime - seconds, 0}};
    CHECK(utimensat(AT_FDCWD, (folder.path() + "/" + name).c_str(), times, 0) == 0, name);
  };
  set_age(half, 1000);
  std::set<std::string> before = folder.Names();
  for (int i = 0; i < 40; ++i) {
    CHECK(cuda::StoreCachedChain(folder.path(), "key " + std::to_string(i), code, kMost), i);
    int64_t bytes = 0;
    for (const std::string& name : folder.Names()) {
      if (name != "notes") bytes += static_cast<int64_t>(Bytes(folder.path() + "/" + name).size());
      if (before.count(name) == 0) set_age(name, 900 - i);
    }
    CHECK(bytes <= kMost, i, ": ", bytes);
    before = folder.Names();
    std::string got;
    for (int kept = std::max(0, i - 1); kept <= i; ++kept) {
      CHECK(cuda::LoadCachedChain(folder.path(), "key " + std::to_string(kept), &got), kept, " of ", i);
    }
  }
  CHECK(before.count(half) == 0 && before.count("notes") == 1);
  CHECK(Bytes(mine).size() == 20000);
  CountCases(40);
}

// Entries are whole at every moment, whoever writes them.
TEST(ChainCacheOfMany) {
  const Folder folder;
  std::vector<std::thread> threads;
  std::atomic<int> wrong{0}, found{0};
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      for (int i = 0; i < 100; ++i) {
        const std::string key = "key " + std::to_string(i % 5), code(static_cast<size_t>(1000 + 5000 * (i % 5)), 'a');
        std::string got;
        if (t % 2 == 0 && !cuda::StoreCachedChain(folder.path(), key, code)) ++wrong;
        if (!cuda::LoadCachedChain(folder.path(), key, &got)) continue;
        ++found;
        if (got != code) ++wrong;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  CHECK(wrong == 0 && found >= 200, wrong.load(), " wrong, ", found.load(), " found");
  CountCases(400);
}

}  // namespace
}  // namespace stof::test
