// SPDX-License-Identifier: Apache-2.0
// A tool of the build: precompile_chains f16|bf16|f32 FILE writes the kernels of usual chains as CUDA source.
#include <cstdio>
#include <cstring>
#include <fstream>

#include "cuda/chain/prebuilt.h"

int main(int argc, char** argv) {
  using stof::DType;
  const std::string name = argc == 3 ? argv[1] : "";
  const DType dtype = name == "f16"    ? DType::kF16
                      : name == "bf16" ? DType::kBF16
                      : name == "f32"  ? DType::kF32
                                       : DType::kUndefined;
  if (dtype == DType::kUndefined) {
    std::fprintf(stderr, "precompile_chains f16|bf16|f32 FILE\n");
    return 2;
  }
  const std::vector<std::string> kernels = stof::cuda::UsualChainKernels(dtype);
  std::ofstream file(argv[2]);
  file << "#include \"cuda/chain/functions.cuh\"\n#include \"cuda/chain/prebuilt.h\"\n"
          "namespace stof {\nnamespace cuda {\nnamespace {\nusing namespace chain;\n";
  std::string table;
  for (size_t i = 0; i < kernels.size(); ++i) {
    const std::string global = "extern \"C\" __global__";
    std::string text = kernels[i];
    const size_t at = text.find(global);
    if (at == std::string::npos) return 1;
    text.replace(at, global.size(), "__global__");
    const std::string space = "k" + std::to_string(i);
    file << "namespace " << space << " {\n" << text << "}\n";
    table += "    {R\"text(" + kernels[i] + ")text\", reinterpret_cast<const void*>(" + space + "::stof_chain)},\n";
  }
  std::string function = name;
  function[0] = static_cast<char>(function[0] - 'a' + 'A');
  file << "}  // namespace\n\nUsualChains UsualChains" << function
       << "() {\n  static const UsualChainKernel kernels[] = {\n"
       << table << "  };\n  return {kernels, " << kernels.size()
       << "};\n}\n\n}  // namespace cuda\n}  // namespace stof\n";
  file.close();
  return kernels.empty() || !file ? 1 : 0;
}
