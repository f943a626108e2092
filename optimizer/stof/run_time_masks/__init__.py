# SPDX-License-Identifier: Apache-2.0
"""Run-time masks: skip by score, choose blocks and choose pages, as steps of the pipeline."""
