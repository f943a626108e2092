// SPDX-License-Identifier: Apache-2.0
#include "cuda/chain/kernel_cache.h"

#include <cuda.h>
#include <cuda_runtime.h>
#include <dlfcn.h>

#include <map>
#include <mutex>
#include <utility>

#include "cuda/chain/codegen.h"
#include "cuda/chain/disk_cache.h"
#include "cuda/chain/nvrtc.h"
#include "cuda/chain/prebuilt.h"
#include "cuda/common/status.h"
#include "stof_build_id.h"

namespace stof {
namespace cuda {
namespace {

// The driver's functions, looked up: the library loads where there is no driver.
struct Driver {
  CUresult (*load)(CUlibrary* library, const void* code, CUjit_option* jit, void** jit_values, unsigned jit_count,
                   CUlibraryOption* options, void** values, unsigned count) = nullptr;
  CUresult (*unload)(CUlibrary library) = nullptr;
  CUresult (*kernel)(CUkernel* kernel, CUlibrary library, const char* name) = nullptr;
  CUresult (*function)(CUfunction* function, CUkernel kernel) = nullptr;
  CUresult (*attribute)(int* value, CUfunction_attribute attribute, CUfunction function) = nullptr;
  CUresult (*launch)(CUfunction function, unsigned x, unsigned y, unsigned z, unsigned threads_x, unsigned threads_y,
                     unsigned threads_z, unsigned shared, CUstream stream, void** params, void** extra) = nullptr;
  CUresult (*text)(CUresult result, const char** text) = nullptr;
  bool whole = false;
};
template <typename F>
bool Find(void* library, const char* name, F* f) {
  *f = reinterpret_cast<F>(dlsym(library, name));
  return *f != nullptr;
}
const Driver& TheDriver() {
  static const Driver driver = [] {
    Driver d;
    void* library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    d.whole = library != nullptr && Find(library, "cuLibraryLoadData", &d.load) &&
              Find(library, "cuLibraryUnload", &d.unload) && Find(library, "cuLibraryGetKernel", &d.kernel) &&
              Find(library, "cuKernelGetFunction", &d.function) && Find(library, "cuFuncGetAttribute", &d.attribute) &&
              Find(library, "cuLaunchKernel", &d.launch) && Find(library, "cuGetErrorString", &d.text);
    return d;
  }();
  return driver;
}
std::string Text(CUresult result) {
  const char* text = nullptr;
  TheDriver().text(result, &text);
  return text == nullptr ? "error " + std::to_string(static_cast<int>(result)) : text;
}

// Loads code on the current device at once: a launch within a capture may not.
void* LoadCode(const std::string& code, std::string* why) {
  const Driver& driver = TheDriver();
  CUlibrary library = nullptr;
  CUkernel kernel = nullptr;
  CUfunction function = nullptr;
  CUresult result = driver.load(&library, code.data(), nullptr, nullptr, 0, nullptr, nullptr, 0);
  if (result == CUDA_SUCCESS) {
    result = driver.kernel(&kernel, library, kChainKernelName);
    if (result == CUDA_SUCCESS) result = driver.function(&function, kernel);
    int registers = 0;
    if (result == CUDA_SUCCESS) result = driver.attribute(&registers, CU_FUNC_ATTRIBUTE_NUM_REGS, function);
    if (result == CUDA_SUCCESS) return function;
    driver.unload(library);
  }
  *why = "the driver does not load it: " + Text(result);
  return nullptr;
}

// One that the library brought along; nullptr: none.
void* FindUsual(const std::string& text) {
  for (const UsualChains& usual : {UsualChainsF16(), UsualChainsBf16(), UsualChainsF32()}) {
    for (int i = 0; i < usual.count; ++i) {
      const UsualChainKernel& one = usual.kernels[i];
      if (text != one.text) continue;
      cudaFunction_t function = nullptr;
      int registers = 0;
      const cudaError_t error = cudaGetFuncBySymbol(&function, one.kernel);
      if (error == cudaSuccess &&
          TheDriver().attribute(&registers, CU_FUNC_ATTRIBUTE_NUM_REGS, function) == CUDA_SUCCESS) {
        return function;
      }
      cudaGetLastError();  // of an architecture that the library was not built for
      return nullptr;
    }
  }
  return nullptr;
}

void* MakeKernel(const std::string& text, int device, std::string* why) {
  if (!TheDriver().whole) {
    *why = "the driver is older than CUDA 12.0";
    return nullptr;
  }
  const RelaxedCapture relaxed;  // another thread's stream may be captured
  void* usual = FindUsual(text);
  if (usual != nullptr) return usual;
  int major = 0, minor = 0;
  if (cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device) != cudaSuccess ||
      cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device) != cudaSuccess) {
    *why = "the device does not tell its capability";
    return nullptr;
  }
  const std::string version = NvrtcVersion(why);
  if (version.empty()) return nullptr;
  const int capability = 10 * major + minor;
  const std::string key =
      "sm " + std::to_string(capability) + ", NVRTC " + version + ", stof " STOF_BUILD_ID "\n" + text;
  const std::string folder = ChainCacheFolder();
  std::string code;
  if (LoadCachedChain(folder, key, &code)) {
    void* kernel = LoadCode(code, why);
    if (kernel != nullptr) return kernel;
  }
  const Status status = CompileCuda(ChainSource(text), capability, &code);
  if (!status.ok()) {
    *why = status.message();
    return nullptr;
  }
  StoreCachedChain(folder, key, code);  // a folder that takes nothing costs time, and nothing else
  return LoadCode(code, why);
}

struct Found {
  void* kernel = nullptr;
  std::string why;
};
struct Kernels {
  std::mutex mutex;  // held while one is made: layers of a model want the same ones
  std::map<std::pair<int, std::string>, Found> found;
};

}  // namespace

void* FindChainKernel(const std::string& text, int device, bool make, std::string* why) {
  static auto* kernels = new Kernels;  // never destroyed: the driver may be gone by then
  const std::lock_guard<std::mutex> lock(kernels->mutex);
  const auto key = std::make_pair(device, text);
  const auto known = kernels->found.find(key);
  if (known != kernels->found.end()) {
    *why = known->second.why;
    return known->second.kernel;
  }
  if (!make) {
    *why = "none is loaded yet, and none can be while a graph is captured: run once with these shapes before";
    return nullptr;
  }
  Found found;
  found.kernel = MakeKernel(text, device, &found.why);
  *why = found.why;
  return (kernels->found[key] = found).kernel;
}

Status LaunchChainKernel(void* kernel, int64_t ctas, int threads, const std::vector<int64_t>& words, void* stream) {
  void* params[] = {const_cast<int64_t*>(words.data())};
  const CUresult result =
      TheDriver().launch(static_cast<CUfunction>(kernel), static_cast<unsigned>(ctas), 1, 1,
                         static_cast<unsigned>(threads), 1, 1, 0, static_cast<CUstream>(stream), params, nullptr);
  if (result == CUDA_SUCCESS) return Status();
  return Status::Error("CUDA: launch of the kernel of a chain: " + Text(result));
}

}  // namespace cuda
}  // namespace stof
