// SPDX-License-Identifier: Apache-2.0
// libstof_trt_autoreg10.so, libstof_trt_autoreg11.so: for hosts that only dlopen plugin libraries (ONNX Runtime's
// TensorRT provider, trtexec --staticPlugins, Triton, DeepStream). Loads libstof_trt.so and registers its creators with
// the TensorRT that the process has. The registry's class differs between major versions, so there is one library for
// each, compiled with its headers. Not linked to TensorRT: loaded where there is none, it does nothing.
#include <NvInferRuntime.h>
#include <dlfcn.h>

#include <cstdio>
#include <string>

#include "plugins/core/host/environment.h"
#include "plugins/core/host/quoted.h"

#define STOF_TEXT2(x) #x
#define STOF_TEXT(x) STOF_TEXT2(x)

namespace {

constexpr int kMajor = NV_TENSORRT_MAJOR;
constexpr const char* kTensorRts[] = {
#if NV_TENSORRT_MAJOR == 11
    "libtensorrt_rtx.so.1",
#endif
    "libnvinfer.so." STOF_TEXT(NV_TENSORRT_MAJOR), "libnvinfer_lean.so." STOF_TEXT(NV_TENSORRT_MAJOR)};

void Complain(const std::string& message) {
  int64_t level = 1;
  const stof::Status status = stof::GetVariable(stof::Variable::kTrtLog, &level);
  if (!status.ok()) std::fprintf(stderr, "stof: %s\n", stof::EscapeMessage(status.message()).c_str());
  if (level > 0) std::fprintf(stderr, "stof: %s\n", stof::EscapeMessage(message).c_str());
}

struct TensorRt {
  int version = 0;
  nvinfer1::IPluginRegistry* registry = nullptr;
};

// Finds TensorRT's functions in a library, or among the global symbols of the process.
bool Find(void* handle, TensorRt* found) {
  void* get_version = dlsym(handle, "getInferLibVersion");
  void* get_registry = dlsym(handle, "getPluginRegistry");
  if (get_version == nullptr || get_registry == nullptr) return false;
  found->version = reinterpret_cast<int32_t (*)()>(get_version)();
  found->registry = reinterpret_cast<nvinfer1::IPluginRegistry* (*)()>(get_registry)();
  return found->registry != nullptr;
}

bool FindTensorRt(TensorRt* found) {
  if (Find(RTLD_DEFAULT, found)) return true;
  for (const char* name : kTensorRts) {  // loaded, but privately
    void* handle = dlopen(name, RTLD_NOLOAD | RTLD_LAZY);
    const bool ok = handle != nullptr && Find(handle, found);
    if (handle != nullptr) dlclose(handle);
    if (ok) return true;
  }
  return false;
}

// TensorRT for RTX counts its own versions and has the interfaces of TensorRT 11.
bool Fits(int version) {
  const int major = version >= 10000 ? version / 10000 : version / 1000;
  return major == kMajor || (kMajor == 11 && version >= 10000 && major < 10);
}

std::string PluginLibrary() {
  if (const char* path = stof::ReadVariable(stof::Variable::kTrtLibrary)) return path;
  Dl_info self;
  if (dladdr(reinterpret_cast<void*>(&Complain), &self) == 0 || self.dli_fname == nullptr) return "libstof_trt.so";
  const std::string path = self.dli_fname;
  const size_t slash = path.rfind('/');
  return (slash == std::string::npos ? std::string() : path.substr(0, slash + 1)) + "libstof_trt.so";
}

__attribute__((constructor)) void Register() {
  TensorRt tensorrt;
  if (!FindTensorRt(&tensorrt)) {
    return Complain("no TensorRT " STOF_TEXT(NV_TENSORRT_MAJOR) " is loaded, so no plugin is registered");
  }
  if (!Fits(tensorrt.version)) {
    return Complain("TensorRT of version " + std::to_string(tensorrt.version) +
                    " is loaded, but this library registers plugins with TensorRT " STOF_TEXT(
                        NV_TENSORRT_MAJOR) ": use libstof_trt_autoreg of its major version");
  }
  const std::string path = PluginLibrary();
  void* library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);  // stays loaded: the registry holds its creators
  if (library == nullptr) return Complain(dlerror());
  using GetCreators = nvinfer1::IPluginCreatorInterface* const* (*)(int32_t&);
  const auto get_creators = reinterpret_cast<GetCreators>(dlsym(library, "getCreators"));
  if (get_creators == nullptr) return Complain(path + " has no getCreators");
  int32_t count = 0;
  nvinfer1::IPluginCreatorInterface* const* creators = get_creators(count);
  for (int32_t i = 0; i < count; ++i) {
    if (!tensorrt.registry->registerCreator(*creators[i], "stof")) {
      Complain("TensorRT did not register a plugin creator; is " + path + " loaded already?");
    }
  }
}

}  // namespace
