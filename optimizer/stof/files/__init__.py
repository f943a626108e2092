# SPDX-License-Identifier: Apache-2.0
"""Files that are read, and output files that appear whole or not at all."""

from stof.files.hub_ids import is_hub_id
from stof.files.locks import folder_lock, try_lock
from stof.files.outputs import check_outputs, check_writable, write_bytes, write_text
from stof.files.reading import check_input, is_utf8, open_regular, read_bytes, read_text, stat_file
from stof.files.temporary import (
    TemporaryFile,
    remove_leftovers,
    remove_temporaries,
    temporary_file,
    temporary_folder,
)

__all__ = [
    "TemporaryFile",
    "check_input",
    "check_outputs",
    "check_writable",
    "folder_lock",
    "is_hub_id",
    "is_utf8",
    "open_regular",
    "read_bytes",
    "read_text",
    "remove_leftovers",
    "remove_temporaries",
    "stat_file",
    "temporary_file",
    "temporary_folder",
    "try_lock",
    "write_bytes",
    "write_text",
]
