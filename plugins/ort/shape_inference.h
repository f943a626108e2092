// SPDX-License-Identifier: Apache-2.0
// Shape inference when a model is loaded: the types and, with symbols, the shapes of a node's outputs.
#ifndef STOF_PLUGINS_ORT_SHAPE_INFERENCE_H_
#define STOF_PLUGINS_ORT_SHAPE_INFERENCE_H_

#include <onnxruntime_c_api.h>

namespace stof::ort {

OrtStatus* ORT_API_CALL InferShapes(const OrtCustomOp* op, OrtShapeInferContext* context);

}  // namespace stof::ort
#endif  // STOF_PLUGINS_ORT_SHAPE_INFERENCE_H_
