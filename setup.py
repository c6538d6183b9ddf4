"""Builds the optional native CPU library: a plain shared library with a C ABI, loaded by ctypes.

Each instruction set has a translation unit of its own with its own flags; which one runs is decided at run time, so a
wheel works on every machine of its architecture, and under every Python. Where there is no compiler the build is skipped
and the engine runs its torch path (`aioengine_kernels.cpu.status()` says why). Metadata is in pyproject.toml.
"""

from __future__ import annotations

import platform
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext
from setuptools.modified import newer_group

SOURCE = Path("kernels/aioengine_kernels/cpu/src")
# No contraction: whether a product and a sum are fused must not depend on the tile that the compiler looks at.
COMMON_FLAGS = (
    *("-O3", "-g0", "-std=c++17", "-fvisibility=hidden", "-ffp-contract=off", "-fno-math-errno"),
    *("-Wno-psabi", "-Wno-maybe-uninitialized"),
)
AVX2_FLAGS = ("-mavx2", "-mfma", "-mf16c")
UNIT_FLAGS: dict[str, tuple[str, ...]] = {
    "kernels_avx2.cpp": AVX2_FLAGS,
    "kernels_avx512.cpp": (*AVX2_FLAGS, "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mavx512vnni"),
}
NATIVE = Extension(
    "aioengine_kernels.cpu._native",
    sources=sorted(str(path) for path in SOURCE.glob("*.cpp")),
    depends=sorted(str(path) for path in SOURCE.glob("*.h")),
    language="c++",
    optional=True,
)


class BuildNative(build_ext):
    """Compiles each source with its own flags, if it or a header is newer than what was compiled of it."""

    def build_extension(self, ext: Extension) -> None:
        threads = ["-pthread"]
        x86 = platform.machine() in ("x86_64", "AMD64")
        objects: list[str] = []
        for source in ext.sources:
            flags = [*COMMON_FLAGS, *threads, *(UNIT_FLAGS.get(Path(source).name, ()) if x86 else ())]
            built = self.compiler.object_filenames([source], output_dir=self.build_temp)
            if self.force or newer_group([source, *ext.depends], built[0]):
                built = self.compiler.compile([source], output_dir=self.build_temp, extra_postargs=flags)
            objects += built
        target = Path(self.get_ext_fullpath(ext.name))
        target.parent.mkdir(parents=True, exist_ok=True)
        self.compiler.link_shared_object(objects, str(target), extra_postargs=threads, target_lang="c++")

    def get_export_symbols(self, ext: Extension) -> list[str]:
        return []  # not a Python module: there is no PyInit function

    def get_ext_filename(self, fullname: str) -> str:
        return str(Path(*fullname.split(".")).with_suffix(".so"))  # without the tag of the Python that builds it


class AnyPythonWheel(bdist_wheel):
    """One wheel for every Python 3: `py3-none-<platform>` with the library, `py3-none-any` where it could not be built."""

    def get_tag(self) -> tuple[str, str, str]:
        _, _, system = super().get_tag()
        has_library = any(Path(self.bdist_dir).rglob("_native.so"))
        return "py3", "none", system if has_library else "any"


setup(ext_modules=[NATIVE], cmdclass={"build_ext": BuildNative, "bdist_wheel": AnyPythonWheel})
