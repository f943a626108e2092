// SPDX-License-Identifier: Apache-2.0
// Whole lives of a plugin: created from a node's attributes, asked what a builder asks, serialized, created again from
// the bytes, attached, and run at several shapes on memory of exactly the size that was agreed on.
#include <map>
#include <set>
#include <thread>

#include "tests/trt/trial.h"

namespace stof::test {
namespace {

// One shape through a plugin.
void RunOnce(const Case& c, const Sizes& n, nvinfer1::IPluginV3OneRuntime* runtime, size_t workspace_bytes,
             Random* random) {
  const Trial trial(c, n, random->Next());
  const Memory workspace(workspace_bytes);
  cudaStream_t stream = ThreadStream();
  trial.Shape(runtime);
  if (LastSeen() != nullptr) LastSeen()->allocated = 0;
  trial.Enqueue(runtime, workspace, stream);
  if (LastSeen() != nullptr) {
    CHECK(LastSeen()->stream == static_cast<void*>(stream) && LastSeen()->allocated <= workspace_bytes);
  }
  trial.Check(stream);
  workspace.Download(stream);  // nothing beside it
}

void Live(uint64_t seed) {
  Random random(seed);
  const Case c = RandomCase(&random);
  const Attributes attributes = AttributesOf(c, &random);
  const Sizes most = RandomSizes(&random, {3, 70, 96}), usual = RandomSizes(&random, most);
  auto built = std::make_unique<Held>(Create(attributes));
  CHECK(built->plugin != nullptr);
  CHECK(std::string(built->core->getPluginName()) == "StofAttention" &&
        std::string(built->core->getPluginVersion()) == "1" &&
        std::string(built->core->getPluginNamespace()) == "stof");
  std::vector<int32_t> tactics;
  const size_t workspace = Build(c, most, usual, built.get(), &tactics);
  Held copy(built->plugin->clone());
  CHECK(std::string(copy.build->getTimingCacheID()) == built->build->getTimingCacheID());
  CHECK(Build(c, most, usual, &copy) == workspace);

  // Into an engine file and out of it, when all that was there at the build is gone.
  auto file = std::make_unique<OwnedFields>(*copy.runtime->getFieldsToSerialize());
  const std::string timing = copy.build->getTimingCacheID();
  built.reset();
  copy.plugin.reset();
  auto loaded =
      std::make_unique<Held>(FindCreator("StofAttention")->createPlugin("layer", file->get(), TensorRTPhase::kRUNTIME));
  file.reset();
  CHECK(loaded->plugin != nullptr && timing == loaded->build->getTimingCacheID());
  Held context(loaded->runtime->attachToContext(nullptr)), other(loaded->plugin->clone());
  loaded.reset();
  // 0 is no tactic, and the last one is of another device.
  const auto tactic = static_cast<int32_t>(random.Range(0, static_cast<int64_t>(tactics.size()) + 1));
  CHECK(context.runtime->setTactic(tactic) == 0);
  const int readies = LastSeen() == nullptr ? 0 : LastSeen()->readies;
  RunOnce(c, usual, context.runtime, workspace, &random);
  if (LastSeen() != nullptr) {
    CHECK(LastSeen()->kernel == (tactic == 0 ? 0 : tactic - 1) && LastSeen()->readies == readies + 1);
  }
  RunOnce(c, most, context.runtime, workspace, &random);
  RunOnce(c, RandomSizes(&random, most), other.runtime, workspace, &random);
  CHECK(LastSeen() == nullptr || LastSeen()->kernel == 0);
  CountCases(3);
}

}  // namespace

TEST(TrtLife) {
  const int count = Cases(150);
  for (int i = 0; i < count; ++i) {
    try {
      Live(static_cast<uint64_t>(i));
    } catch (Failure& failure) {
      failure.message += ", seed " + std::to_string(i);
      throw;
    }
  }
}

// Contexts on threads of their own share what was created once.
TEST(TrtContextsOnThreads) {
  Random random(7);
  const Case c = RandomCase(&random);
  const Sizes most = {2, 40, 64};
  Held built = Create(AttributesOf(c, &random));
  const size_t workspace = Build(c, most, most, &built);
  std::vector<std::string> errors(4);
  std::vector<std::thread> threads;
  for (size_t t = 0; t < errors.size(); ++t) {
    threads.emplace_back([&, t] {
      Random own(100 + t);
      Held context(built.runtime->attachToContext(nullptr));
      try {
        for (int i = 0; i < 5; ++i) RunOnce(c, RandomSizes(&own, most), context.runtime, workspace, &own);
      } catch (const Failure& failure) {
        errors[t] = failure.message;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (const std::string& error : errors) CHECK(error.empty(), error);
  CountCases(20);
}

// One timing serves two layers only where everything but their shapes is equal.
TEST(TrtTimingIds) {
  std::vector<Attributes> different(11);
  different[1].strings["mask"] = "k <= q";
  different[2].strings["mask"] = "abs(q - k) <= 64";
  different[3].strings["mask"] = "abs(q - k) <= 65";
  different[4].strings["layout"] = "BSHD";
  different[5].ints["num_heads"] = 4;
  different[6].floats["softcap"] = 20;
  for (int i = 7; i < 9; ++i) {
    different[i].strings["mask"] = "table0[k]";
    different[i].strings["operands"] = "table0";
    different[i].strings["constants"] = i == 7 ? "3 bool 5 Hw==" : "3 bool 5 Fw==";
  }
  for (int i = 9; i < 11; ++i) {
    different[i].strings["layout"] = "BSN";
    different[i].ints = {{"num_heads", 2}, {"kv_num_heads", 2}};
    different[i].lists["packed"] = {0, 6, 2, 6, i == 9 ? 4 : 3, 6};
  }
  std::set<std::string> ids;
  for (const Attributes& attributes : different) {
    const Held one = Create(attributes), two = Create(attributes);
    CHECK(one.plugin != nullptr && two.plugin != nullptr);
    CHECK(std::string(one.build->getTimingCacheID()) == two.build->getTimingCacheID());
    ids.insert(one.build->getTimingCacheID());
  }
  CHECK(ids.size() == different.size());
  CountCases(static_cast<int64_t>(ids.size()));
}

// An engine file says that it holds lists, which older libraries would not see; one that nobody asks for it does not
// hold.
TEST(TrtFormats) {
  const auto written = [](const Attributes& attributes) {
    const Held one = Create(attributes);
    CHECK(one.plugin != nullptr);
    std::map<std::string, std::vector<int32_t>> found;
    const nvinfer1::PluginFieldCollection* fields = one.runtime->getFieldsToSerialize();
    for (int i = 0; i < fields->nbFields; ++i) {
      const PluginField& field = fields->fields[i];
      if (field.type != PluginFieldType::kINT32) continue;
      const auto* numbers = static_cast<const int32_t*>(field.data);
      found[field.name] = std::vector<int32_t>(numbers, numbers + field.length);
    }
    return found;
  };
  Attributes attributes;
  attributes.lists["tile"] = {64, 64};
  auto fields = written(attributes);
  CHECK(fields["stof_format"] == std::vector<int32_t>({3}) && fields.count("tile") == 0);
  attributes.lists["packed"] = {0, 2, 0, 2, 0, 2};
  fields = written(attributes);
  CHECK(fields["stof_format"] == std::vector<int32_t>({4}) && fields["packed"] == attributes.lists["packed"]);
  CountCases(2);
}

}  // namespace stof::test
