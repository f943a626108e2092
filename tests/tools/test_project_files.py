# SPDX-License-Identifier: Apache-2.0
"""Files for those who host and release the project: workflows, templates, hooks of commits, and the facts of a release."""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import tomllib
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import yaml

import stof
from stof.installation import read_version

ROOT = Path(__file__).resolve().parents[2]
FACTS = runpy.run_path(str(ROOT / "tools/release_facts.py"))
PYPROJECT = (ROOT / "pyproject.toml").read_text()
CHANGELOG = "# Changelog\n\n## 0.2.0 (2026-01-31)\n\n* An entry.\n\n## 0.1.0 (2026-01-01)\n\nThe first.\n\n* Another.\n"


def read_yaml(name: str) -> Any:
    return yaml.safe_load((ROOT / name).read_text())


def steps(name: str) -> list[dict[str, Any]]:
    return [step for job in read_yaml(f".github/workflows/{name}")["jobs"].values() for step in job["steps"]]


@pytest.mark.parametrize(
    ("name", "targets"), [("test.yml", ["test"]), ("wheels.yml", ["wheels", "release-check"])]
)  # fmt: skip
def test_workflows_call_targets_that_exist(name: str, targets: list[str]) -> None:
    commands = [step["run"] for step in steps(name) if "run" in step]
    assert [command.split()[1] for command in commands if command.startswith("make ")] == targets
    makefile = (ROOT / "Makefile").read_text()
    for target in targets:
        recipe = re.search(rf"^{target}:\n\t(.*)$", makefile, re.MULTILINE)
        assert recipe, target
        (script,) = re.findall(r"tools/\w+\.sh", recipe[1])
        assert (ROOT / script).is_file()
        subprocess.run(["bash", "-n", ROOT / script], check=True)


def test_a_tag_has_to_be_the_version() -> None:
    """Before anything is built, and in runs for tags alone."""
    (at,) = [i for i, step in enumerate(steps("wheels.yml")) if "release_facts.py" in step.get("run", "")]
    builds = [i for i, step in enumerate(steps("wheels.yml")) if step.get("run", "").startswith("make ")]
    assert at < min(builds)
    step = steps("wheels.yml")[at]
    assert step["if"] == "startsWith(github.ref, 'refs/tags/')"
    version = tomllib.loads(PYPROJECT)["project"]["version"]
    for tag, code in ((f"v{version}", 0), (version, 1), ("v9.9.9", 1)):
        environment = {**os.environ, "GITHUB_REF_NAME": tag}
        assert subprocess.run(["bash", "-c", step["run"]], cwd=ROOT, env=environment, check=False).returncode == code, (
            tag
        )


def test_workflows_name_versions_of_actions_and_rights() -> None:
    names = sorted(path.name for path in (ROOT / ".github/workflows").iterdir())
    assert names == ["test.yml", "wheels.yml"]
    for name in names:
        used = [step["uses"] for step in steps(name) if "uses" in step]
        assert used
        assert all(re.fullmatch(r"actions/[\w-]+@v\d+", action) for action in used)
        assert read_yaml(f".github/workflows/{name}")["permissions"] == {"contents": "read"}


def test_commit_hooks_are_the_lint_part() -> None:
    """Each hook is a command of `tools/test.sh lint`."""
    lint = (ROOT / "tools/test.sh").read_text().partition("if wants lint; then")[2].partition("\nfi\n")[0]
    (local,) = read_yaml(".pre-commit-config.yaml")["repos"]
    assert local["repo"] == "local"
    entries = [hook["entry"] for hook in local["hooks"]]
    assert entries == ["ruff check", "ruff format --check", "mypy", "clang-format --dry-run --Werror"]
    for entry in entries:
        assert entry in lint


@pytest.mark.parametrize("name", ["bug.yml", "feature.yml"])
def test_issue_forms(name: str) -> None:
    """What GitHub asks of a form: a name, a description, and fields with ids of their own and labels."""
    form = read_yaml(f".github/ISSUE_TEMPLATE/{name}")
    assert {"name", "description", "body"} <= form.keys()
    ids = [field["id"] for field in form["body"]]
    assert len(set(ids)) == len(ids) > 1
    assert all(field["type"] == "textarea" and field["attributes"]["label"] for field in form["body"])
    options = set(re.findall(r"--[a-z-]+", str(form)))
    assert options
    page = (ROOT / "docs/guide/options.md").read_text() + (ROOT / "docs/guide/troubleshooting.md").read_text()
    assert {option for option in options if option not in page} == set()


def test_version_of_the_source_tree() -> None:
    version = tomllib.loads(PYPROJECT)["project"]["version"]
    assert stof.__version__ == read_version(ROOT / "optimizer/stof") == version


def test_version_of_an_installation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without stof's own pyproject.toml above the package, the version is that of the distribution, of either name."""
    folder = tmp_path / "lib/stof"
    folder.mkdir(parents=True)
    (tmp_path / "pyproject.toml").write_text('[project]\nname = "other"\nversion = "9"\n')
    installed = {"stof-onnx-cuda13": "1.2.3"}

    def version(name: str) -> str:
        if name not in installed:
            raise metadata.PackageNotFoundError(name)
        return installed[name]

    monkeypatch.setattr(metadata, "version", version)
    assert read_version(folder) == "1.2.3"
    installed["stof-onnx"] = "1.2.4"
    assert read_version(folder) == "1.2.4"
    installed.clear()
    with pytest.raises(metadata.PackageNotFoundError, match="stof-onnx-cuda13"):
        read_version(folder)


def faults(project: str, changelog: str = CHANGELOG) -> list[str]:
    return list(FACTS["project_faults"](project, changelog))


READY = PYPROJECT.replace("OWNER", "somebody").replace('version = "0.1.0"', 'version = "0.2.0"')


def test_a_project_that_can_be_released() -> None:
    assert faults(READY) == []


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("somebody", "OWNER", "has the placeholder OWNER"),
        ('version = "0.2.0"', 'version = "0.2"', "the version is 0.2, expected X.Y.Z"),
        ('version = "0.2.0"', 'version = "0.3.0"', "no section '## 0.3.0'"),
        ('    "Operating System :: Microsoft :: Windows",\n', "", "no classifier 'Operating System :: Microsoft"),
        ("Issues =", "Tracker =", r"\[project.urls\] has no Issues"),
    ],
)
def test_faults_of_the_project_file(old: str, new: str, words: str) -> None:
    assert old in READY
    assert any(re.search(words, fault) for fault in faults(READY.replace(old, new)))


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [("(2026-01-31)", "(unreleased)", "has no date"), ("* An entry.", "Nothing.", "the section of 0.2.0 has no entry")],
)
def test_faults_of_the_changelog(old: str, new: str, words: str) -> None:
    (fault,) = faults(READY, CHANGELOG.replace(old, new))
    assert words in fault


def test_the_version_stands_once() -> None:
    version = tomllib.loads(PYPROJECT)["project"]["version"]
    listed = ["git", "ls-files", "optimizer/stof/*.py", "plugins", "CMakeLists.txt", "cmake"]
    names = subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    sources = {name: (ROOT / name).read_text() for name in names}
    assert list(FACTS["source_faults"](version, sources)) == []
    (fault,) = FACTS["source_faults"](version, {"a.py": f'x = 1\n__version__ = "{version}"\n'})
    assert "a.py" in fault
