# SPDX-License-Identifier: Apache-2.0
"""The process that holds sessions: how it is started, and the channel to it on each system."""
