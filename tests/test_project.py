"""What others need to join: workflows, templates and hooks are valid by their own linters."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SCHEMAS = {
    ".github/workflows/*.yml": "vendor.github-workflows",
    ".github/dependabot.yml": "vendor.dependabot",
    ".github/ISSUE_TEMPLATE/[!c]*.yml": "vendor.github-issue-forms",
    ".github/ISSUE_TEMPLATE/config.yml": "vendor.github-issue-config",
    "CITATION.cff": "vendor.citation-file-format",
}


def run(*command: str) -> None:
    tool = Path(sys.executable).parent / command[0]
    done = subprocess.run([tool, *command[1:]], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("pattern", SCHEMAS)
def test_a_file_fits_the_schema_of_those_who_read_it(pattern):
    files = sorted(str(path) for path in ROOT.glob(pattern))
    assert files, f"no {pattern}"
    run("check-jsonschema", "--builtin-schema", SCHEMAS[pattern], *files)


def test_workflows_hold_no_known_weakness():
    run("zizmor", "--offline", "--no-progress", ".github")


def test_the_hooks_before_a_commit_are_valid():
    run("pre-commit", "validate-config")


def test_the_matrix_tries_what_the_package_claims():
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    matrix = (ROOT / ".github/workflows/test.yml").read_text(encoding="utf-8")
    assert 'requires-python = ">=3.11"' in project
    assert '"torch>=2.11"' in project
    assert 'python: ["3.11",' in matrix
    assert 'torch: ["2.11.0",' in matrix
