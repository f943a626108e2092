// SPDX-License-Identifier: Apache-2.0
// The library as hosts load it: what it exports and declares, and that it works by its two symbols alone.
#include <dlfcn.h>

#include <algorithm>
#include <map>
#include <set>
#include <string>

#include "plugins/core/contract/op.h"
#include "tests/trt/harness.h"

namespace stof::test {

TEST(TrtDeclares) {
  int count = 0;
  const OpDescription* const* ops = AllOps(&count);
  int32_t creators = 0;
  const auto offered =
      std::count_if(ops, ops + count, [](const auto* op) { return op->has_cuda_kernels() && op->has_tensorrt_plugin; });
  CHECK(getCreators(creators) != nullptr && creators == offered && creators > 0);
  for (int i = 0; i < count; ++i) {
    if (!ops[i]->has_cuda_kernels() || !ops[i]->has_tensorrt_plugin) {
      CHECK(FindCreator(ops[i]->name) == nullptr, ops[i]->name);
      continue;
    }
    nvinfer1::IPluginCreatorV3One* creator = FindCreator(ops[i]->name);
    CHECK(creator != nullptr && std::string(creator->getPluginVersion()) == "1" &&
          std::string(creator->getPluginNamespace()) == "stof");
    CHECK(std::string(creator->getInterfaceInfo().kind) == "PLUGIN CREATOR_V3ONE");
    const nvinfer1::PluginFieldCollection* fields = creator->getFieldNames();
    std::set<std::string> left_out;  // that plugins do not read
    for (const AttributeDescription& attribute : ops[i]->attributes) {
      if (!attribute.is_for_tensorrt) left_out.insert(attribute.name);
    }
    CHECK(fields->nbFields ==
          ops[i]->attributes.size() - static_cast<int>(left_out.size()) + (ops[i]->is_variadic ? 2 : 1));
    std::map<std::string, PluginFieldType> types;
    for (int f = 0; f < fields->nbFields; ++f) types[fields->fields[f].name] = fields->fields[f].type;
    CHECK(static_cast<int>(types.size()) == fields->nbFields);
    // Every attribute that the operator asks for is declared: the parser drops others without a word.
    class Asked final : public AttributeReader {
     public:
      Asked(const std::map<std::string, PluginFieldType>& types, const std::set<std::string>& left_out)
          : types_(types), left_out_(left_out) {}
      bool Int(const char* name, int64_t*) const override { return Seen(name, PluginFieldType::kINT32); }
      bool Float(const char* name, float*) const override { return Seen(name, PluginFieldType::kFLOAT32); }
      bool String(const char* name, std::string*) const override { return Seen(name, PluginFieldType::kCHAR); }
      bool Ints(const char* name, std::vector<int64_t>*) const override { return Seen(name, PluginFieldType::kINT32); }

     private:
      bool Seen(const char* name, PluginFieldType type) const {
        const auto found = types_.find(name);
        const bool is_declared = found != types_.end();
        CHECK(is_declared != (left_out_.count(name) == 1) && (!is_declared || found->second == type), name);
        return false;
      }
      const std::map<std::string, PluginFieldType>& types_;
      const std::set<std::string>& left_out_;
    };
    std::unique_ptr<Op> op;
    // A chain without a description is none, but it has asked for all.
    CHECK(ops[i]->create(Asked(types, left_out), &op).ok() != ops[i]->is_variadic, ops[i]->name);
    CountCases(fields->nbFields);
  }
}

TEST(TrtSharedLibrary) {
  void* library = dlopen(STOF_TRT_PATH, RTLD_NOW | RTLD_LOCAL);
  CHECK(library != nullptr, dlerror());
  CHECK(dlsym(library, "setLoggerFinder") != nullptr && dlsym(library, "RegisterCustomOps") == nullptr);
  using GetCreators = nvinfer1::IPluginCreatorInterface* const* (*)(int32_t&);
  const auto get = reinterpret_cast<GetCreators>(dlsym(library, "getCreators"));
  CHECK(get != nullptr);
  int32_t count = 0;
  auto* creator = static_cast<nvinfer1::IPluginCreatorV3One*>(get(count)[0]);
  int32_t mine = 0;
  const bool own = get(count)[0] != getCreators(mine)[0];
  CHECK(own && count == mine && count == 3, "the library's own");
  Attributes attributes;
  attributes.strings["mask"] = "abs(q - k) <= 4";
  OwnedFields fields(attributes);
  Held held(creator->createPlugin("layer", fields.get(), TensorRTPhase::kBUILD));
  CHECK(held.plugin != nullptr);
  const std::vector<int64_t> dims = {1, 2, 40, 16};
  std::vector<nvinfer1::DynamicPluginTensorDesc> bounds(4, Bounds(DataType::kHALF, dims, dims, dims));
  CHECK(held.build->configurePlugin(bounds.data(), 3, &bounds[3], 1) == 0);
  OwnedFields file(*held.runtime->getFieldsToSerialize());
  Held loaded(creator->createPlugin("layer", file.get(), TensorRTPhase::kRUNTIME));
  CHECK(loaded.plugin != nullptr);
#ifdef STOF_WITHOUT_KERNELS
  // An engine is built and loaded without kernels; only a run says that they are missing.
  CHECK(held.build->getNbTactics() == 0);
  const std::vector<nvinfer1::PluginTensorDesc> plain(4, Desc(DataType::kHALF, dims));
  CHECK(loaded.runtime->onShapeChange(plain.data(), 3, &plain[3], 1) == 0);
  alignas(64) static char data[1 * 2 * 40 * 16 * 2];
  const void* inputs[] = {data, data, data};
  void* outputs[] = {data};
  CHECK(loaded.runtime->enqueue(plain.data(), &plain[3], inputs, outputs, nullptr, nullptr) != 0);
#endif
  CountCases(1);
}

}  // namespace stof::test
