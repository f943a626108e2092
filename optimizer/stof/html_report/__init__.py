# SPDX-License-Identifier: Apache-2.0
"""The report as one self-contained HTML page."""

from stof.html_report.folder_page import folder_to_html
from stof.html_report.page import to_html

__all__ = ["folder_to_html", "to_html"]
