# SPDX-License-Identifier: Apache-2.0
"""Running models in ONNX Runtime: inputs for them, and sessions in a process of their own."""
