// SPDX-License-Identifier: Apache-2.0
// The two symbols that TensorRT looks for in a plugin library (IPluginRegistry::loadLibrary, trtexec --dynamicPlugins).
// Nothing is linked from TensorRT. A library that registers itself is another one, autoreg.cc: in one library the two
// ways would register every creator twice.
#include <exception>
#include <memory>
#include <vector>

#include "plugins/core/contract/op.h"
#include "plugins/core/host/fork_guard.h"
#include "plugins/trt/log.h"
#include "plugins/trt/plugin.h"

namespace {

// Never destroyed: the registry keeps the pointers until the library is deregistered, or the process ends.
const std::vector<nvinfer1::IPluginCreatorInterface*>& Creators() {
  static stof::ProcessWide<const std::vector<nvinfer1::IPluginCreatorInterface*>> all;
  return all.Get([] {
    std::vector<nvinfer1::IPluginCreatorInterface*> creators;
    int count = 0;
    const stof::OpDescription* const* ops = stof::AllOps(&count);
    for (int i = 0; i < count; ++i) {
      if (ops[i]->has_cuda_kernels() && ops[i]->has_tensorrt_plugin) {
        creators.push_back(new stof::trt::Creator(*ops[i]));
      }
    }
    return creators;
  });
}

}  // namespace

extern "C" {

__attribute__((visibility("default"))) nvinfer1::IPluginCreatorInterface* const* getCreators(int32_t& count) noexcept {
  try {
    count = static_cast<int32_t>(Creators().size());
    return Creators().data();
  } catch (const std::exception& error) {
    stof::trt::Log(stof::trt::LogLevel::kError, "", error.what());
    count = 0;
    return nullptr;
  }
}

// loadLibrary refuses a library without it. The finder's and the logger's classes differ between TensorRT 10 and 11, so
// neither is touched.
__attribute__((visibility("default"))) void setLoggerFinder(void*) noexcept {}

}  // extern "C"
