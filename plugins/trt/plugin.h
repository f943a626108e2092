// SPDX-License-Identifier: Apache-2.0
// TensorRT's view of an OpDescription: IPluginV3 with its three capabilities, and the creator. Only interfaces that are
// the same in TensorRT 10, 11 and TensorRT for RTX are used (not ILogger, ILoggerFinder and IPluginRegistry), so that
// one library serves all.
#ifndef STOF_PLUGINS_TRT_PLUGIN_H_
#define STOF_PLUGINS_TRT_PLUGIN_H_

#include <NvInferRuntime.h>

#include <memory>
#include <string>
#include <vector>

#include "plugins/core/contract/op.h"
#include "plugins/trt/captured_graphs.h"
#include "plugins/trt/definition.h"

namespace stof::trt {

class Plugin final : public nvinfer1::IPluginV3,
                     public nvinfer1::IPluginV3OneCore,
                     public nvinfer1::IPluginV3OneBuildV2,
                     public nvinfer1::IPluginV3OneRuntime {
 public:
  explicit Plugin(std::shared_ptr<const Definition> definition) : definition_(std::move(definition)) {}

  // IPluginV3
  nvinfer1::IPluginCapability* getCapabilityInterface(nvinfer1::PluginCapabilityType type) noexcept override;
  nvinfer1::IPluginV3* clone() noexcept override;

  // IPluginV3OneCore
  const char* getPluginName() const noexcept override { return definition_->description().name; }
  const char* getPluginVersion() const noexcept override { return kVersion; }
  const char* getPluginNamespace() const noexcept override { return kNamespace; }

  // IPluginV3OneBuildV2
  int32_t configurePlugin(const nvinfer1::DynamicPluginTensorDesc* in, int32_t in_count,
                          const nvinfer1::DynamicPluginTensorDesc* out, int32_t out_count) noexcept override;
  int32_t getOutputDataTypes(nvinfer1::DataType* out, int32_t out_count, const nvinfer1::DataType* in,
                             int32_t in_count) const noexcept override;
  int32_t getOutputShapes(const nvinfer1::DimsExprs* in, int32_t in_count, const nvinfer1::DimsExprs* shape_in,
                          int32_t shape_in_count, nvinfer1::DimsExprs* out, int32_t out_count,
                          nvinfer1::IExprBuilder& builder) noexcept override;
  bool supportsFormatCombination(int32_t at, const nvinfer1::DynamicPluginTensorDesc* in_out, int32_t in_count,
                                 int32_t out_count) noexcept override;
  int32_t getNbOutputs() const noexcept override { return definition_->outputs(); }
  size_t getWorkspaceSize(const nvinfer1::DynamicPluginTensorDesc* in, int32_t in_count,
                          const nvinfer1::DynamicPluginTensorDesc* out, int32_t out_count) const noexcept override;
  int32_t getNbTactics() noexcept override;
  int32_t getValidTactics(int32_t* tactics, int32_t count) noexcept override;
  const char* getTimingCacheID() noexcept override { return definition_->timing_id(); }
  const char* getMetadataString() noexcept override { return definition_->metadata(); }

  // IPluginV3OneRuntime
  int32_t setTactic(int32_t tactic) noexcept override;
  int32_t onShapeChange(const nvinfer1::PluginTensorDesc* in, int32_t in_count, const nvinfer1::PluginTensorDesc* out,
                        int32_t out_count) noexcept override;
  int32_t enqueue(const nvinfer1::PluginTensorDesc* in, const nvinfer1::PluginTensorDesc* out,
                  const void* const* inputs, void* const* outputs, void* workspace,
                  cudaStream_t stream) noexcept override;
  nvinfer1::IPluginV3* attachToContext(nvinfer1::IPluginResourceContext* context) noexcept override;
  const nvinfer1::PluginFieldCollection* getFieldsToSerialize() noexcept override { return definition_->serialized(); }

 private:
  // Tactic t is RunContext::kernel t - 1. Tactics 0 (none, for TensorRT) and 1 leave the choice to the library.
  int kernel() const { return tactic_ > 0 ? tactic_ - 1 : 0; }
  bool IsCountRight(int32_t in_count, int32_t out_count) const;
  Status CheckCounts(int32_t in_count, int32_t out_count) const;
  Status Configure(const nvinfer1::DynamicPluginTensorDesc* in);
  void Load(const nvinfer1::DynamicPluginTensorDesc* in) const;
  Status Workspace(const nvinfer1::DynamicPluginTensorDesc* in, size_t* bytes) const;
  Status Shapes(const nvinfer1::DimsExprs* in, nvinfer1::DimsExprs* out, nvinfer1::IExprBuilder* builder) const;
  // Types and shapes of this run's inputs, and the memory that it needs.
  Status Plan(const nvinfer1::PluginTensorDesc* in, Tensor* inputs);
  Status Enqueue(const nvinfer1::PluginTensorDesc* in, const nvinfer1::PluginTensorDesc* out, const void* const* inputs,
                 void* const* outputs, void* workspace, void* stream);

  const std::shared_ptr<const Definition> definition_;
  int32_t tactic_ = 0;
  int32_t tactics_ = 0;  // how many configurePlugin found
  // The inputs that planned_, the workspace in bytes, is for.
  std::vector<Tensor> planned_for_;
  size_t planned_ = 0;
  bool runs_several_kernels_ = false;
  CapturedGraphs graphs_;
};

class Creator final : public nvinfer1::IPluginCreatorV3One {
 public:
  explicit Creator(const OpDescription& description);
  nvinfer1::IPluginV3* createPlugin(const char* name, const nvinfer1::PluginFieldCollection* fields,
                                    nvinfer1::TensorRTPhase phase) noexcept override;
  const nvinfer1::PluginFieldCollection* getFieldNames() noexcept override { return &collection_; }
  const char* getPluginName() const noexcept override { return description_.name; }
  const char* getPluginVersion() const noexcept override { return kVersion; }
  const char* getPluginNamespace() const noexcept override { return kNamespace; }

 private:
  const OpDescription& description_;
  std::vector<nvinfer1::PluginField> fields_;
  nvinfer1::PluginFieldCollection collection_;
};

}  // namespace stof::trt
#endif  // STOF_PLUGINS_TRT_PLUGIN_H_
