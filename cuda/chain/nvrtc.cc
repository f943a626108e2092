// SPDX-License-Identifier: Apache-2.0
#include "cuda/chain/nvrtc.h"

#include <dlfcn.h>
#include <link.h>
#include <sys/stat.h>

#include <algorithm>
#include <cstring>
#include <vector>

#include "plugins/core/host/environment.h"

namespace stof {
namespace cuda {
namespace {

// NVRTC's C interface, as its documentation gives it; 0 is success.
struct Program;
struct Nvrtc {
  void* library = nullptr;
  int (*version)(int* major, int* minor) = nullptr;
  int (*count)(int* architectures) = nullptr;
  int (*list)(int* architectures) = nullptr;
  int (*create)(Program** program, const char* source, const char* name, int headers, const char* const* texts,
                const char* const* names) = nullptr;
  int (*destroy)(Program** program) = nullptr;
  int (*compile)(Program* program, int options, const char* const* texts) = nullptr;
  int (*log_size)(Program* program, size_t* bytes) = nullptr;
  int (*log)(Program* program, char* text) = nullptr;
  int (*cubin_size)(Program* program, size_t* bytes) = nullptr;
  int (*cubin)(Program* program, char* code) = nullptr;
  int (*ptx_size)(Program* program, size_t* bytes) = nullptr;
  int (*ptx)(Program* program, char* code) = nullptr;
  std::string looked;
};

template <typename F>
bool Find(void* library, const char* name, F* f) {
  *f = reinterpret_cast<F>(dlsym(library, name));
  return *f != nullptr;
}
bool Resolve(Nvrtc* n) {
  return Find(n->library, "nvrtcVersion", &n->version) && Find(n->library, "nvrtcGetNumSupportedArchs", &n->count) &&
         Find(n->library, "nvrtcGetSupportedArchs", &n->list) && Find(n->library, "nvrtcCreateProgram", &n->create) &&
         Find(n->library, "nvrtcDestroyProgram", &n->destroy) && Find(n->library, "nvrtcCompileProgram", &n->compile) &&
         Find(n->library, "nvrtcGetProgramLogSize", &n->log_size) && Find(n->library, "nvrtcGetProgramLog", &n->log) &&
         Find(n->library, "nvrtcGetCUBINSize", &n->cubin_size) && Find(n->library, "nvrtcGetCUBIN", &n->cubin) &&
         Find(n->library, "nvrtcGetPTXSize", &n->ptx_size) && Find(n->library, "nvrtcGetPTX", &n->ptx);
}

// Folders of Python packages that loaded libraries came from: NVRTC's package lies beside them.
int CollectPackages(dl_phdr_info* info, size_t, void* data) {
  auto* folders = static_cast<std::vector<std::string>*>(data);
  const std::string path = info->dlpi_name == nullptr ? "" : info->dlpi_name;
  for (const char* part : {"/site-packages/", "/dist-packages/", "/nvidia/", "/onnxruntime/", "/torch/"}) {
    const size_t at = path.rfind(part);
    if (at == std::string::npos) continue;
    const bool packages = std::strstr(part, "packages") != nullptr;
    const std::string folder = path.substr(0, at + (packages ? std::strlen(part) : 1));
    // Where anybody may write, anybody's code would be loaded.
    struct stat state = {};
    if (folder[0] != '/' || stat(folder.c_str(), &state) != 0 || (state.st_mode & S_IWOTH) != 0) continue;
    if (std::find(folders->begin(), folders->end(), folder) == folders->end()) folders->push_back(folder);
  }
  return 0;
}

Nvrtc Open() {
  Nvrtc n;
  std::vector<std::string> names;
  const char* own = ReadVariable(Variable::kNvrtc);
  if (own != nullptr) {
    if (std::strcmp(own, "off") != 0) names.push_back(own);
    n.looked = "STOF_NVRTC=" + std::string(own);
  } else {
    n.looked = "libnvrtc.so.13, libnvrtc.so.12 and the Python packages nvidia-cuda-nvrtc; STOF_NVRTC names another";
    names = {"libnvrtc.so.13", "libnvrtc.so.12"};
    std::vector<std::string> folders;
    dl_iterate_phdr(CollectPackages, &folders);
    for (const std::string& folder : folders) {
      names.push_back(folder + "nvidia/cu13/lib/libnvrtc.so.13");
      names.push_back(folder + "nvidia/cuda_nvrtc/lib/libnvrtc.so.13");
      names.push_back(folder + "nvidia/cuda_nvrtc/lib/libnvrtc.so.12");
    }
    names.push_back("/usr/local/cuda/lib64/libnvrtc.so");
  }
  for (const std::string& name : names) {
    n.library = dlopen(name.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (n.library == nullptr) continue;
    int major = 0, minor = 0;
    if (Resolve(&n) && n.version(&major, &minor) == 0) {
      // NVRTC opens its second library by name alone, which does not lead to its own folder.
      const size_t folder = name.rfind('/');
      if (folder != std::string::npos) {
        const std::string second = "libnvrtc-builtins.so." + std::to_string(major) + "." + std::to_string(minor);
        dlopen((name.substr(0, folder + 1) + second).c_str(), RTLD_NOW | RTLD_LOCAL);
      }
      return n;
    }
    dlclose(n.library);
    n.library = nullptr;
  }
  return n;
}

const Nvrtc& Library() {
  static const Nvrtc nvrtc = Open();
  return nvrtc;
}

}  // namespace

std::string NvrtcVersion(std::string* why) {
  const Nvrtc& n = Library();
  int major = 0, minor = 0;
  if (n.library == nullptr || n.version(&major, &minor) != 0) {
    *why = "no NVRTC was found (" + n.looked + ")";
    return std::string();
  }
  return std::to_string(major) + "." + std::to_string(minor);
}

Status CompileCuda(const std::string& source, int capability, std::string* code) {
  const Nvrtc& n = Library();
  if (n.library == nullptr) return Status::Error("no NVRTC was found (" + n.looked + ")");
  int count = 0;
  if (n.count(&count) != 0 || count <= 0) return Status::Error("NVRTC names no architecture");
  std::vector<int> known(static_cast<size_t>(count));
  if (n.list(known.data()) != 0) return Status::Error("NVRTC names no architecture");
  const bool exact = std::find(known.begin(), known.end(), capability) != known.end();
  int best = 0;
  for (int one : known) best = one <= capability ? std::max(best, one) : best;
  if (best < 80) return Status::Error("NVRTC compiles for no architecture that this device runs");
  const std::string target = "--gpu-architecture=" + std::string(exact ? "sm_" : "compute_") + std::to_string(best);
  const char* options[] = {target.c_str(), "--std=c++17", "-default-device"};
  Program* program = nullptr;
  if (n.create(&program, source.c_str(), "stof_chain.cu", 0, nullptr, nullptr) != 0) {
    return Status::Error("NVRTC takes no program");
  }
  Status status;
  size_t bytes = 0;
  if (n.compile(program, 3, options) != 0) {
    std::string log;
    if (n.log_size(program, &bytes) == 0 && bytes > 1) {
      log.resize(bytes);
      n.log(program, &log[0]);
    }
    status = Status::Error("NVRTC refuses the kernel of a chain: " + log.substr(0, 2000));
  } else if ((exact ? n.cubin_size : n.ptx_size)(program, &bytes) != 0 || bytes == 0) {
    status = Status::Error("NVRTC gives no code");
  } else {
    code->assign(bytes, '\0');
    if ((exact ? n.cubin : n.ptx)(program, &(*code)[0]) != 0) status = Status::Error("NVRTC gives no code");
  }
  n.destroy(&program);
  return status;
}

}  // namespace cuda
}  // namespace stof
