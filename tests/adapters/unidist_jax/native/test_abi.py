"""What `native/xla_ffi.h` declares of XLA's foreign function interface is what jaxlib's own header says."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

jax = pytest.importorskip("jax", reason="the header is in jaxlib")

_HEADER = Path(__file__).parents[4] / "adapters/unidist_jax/native/xla_ffi.h"

_STRUCTS = {
    ("ffi_extension", "XLA_FFI_Extension_Base"): {"struct_size": "", "type": "", "next": ""},
    ("ffi_version", "XLA_FFI_Api_Version"): {
        "struct_size": "", "extensions": "extension_start", "major": "major_version", "minor": "minor_version",
    },
    ("ffi_metadata", "XLA_FFI_Metadata"): {"struct_size": "", "version": "api_version", "traits": ""},
    ("ffi_metadata_extension", "XLA_FFI_Metadata_Extension"): {"base": "extension_base", "metadata": ""},
    ("ffi_buffer", "XLA_FFI_Buffer"): {
        "struct_size": "", "extensions": "extension_start", "dtype": "", "data": "", "rank": "", "dims": "",
    },
    ("ffi_values", "XLA_FFI_Args"): {
        "struct_size": "", "extensions": "extension_start", "count": "size", "types": "", "values": "args",
    },
    ("ffi_values", "XLA_FFI_Rets"): {
        "struct_size": "", "extensions": "extension_start", "count": "size", "types": "", "values": "rets",
    },
    ("ffi_scalar", "XLA_FFI_Scalar"): {"dtype": "", "value": ""},
    ("ffi_attributes", "XLA_FFI_Attrs"): {
        "struct_size": "", "extensions": "extension_start", "count": "size", "types": "", "names": "",
        "values": "attrs",
    },
    ("ffi_error_arguments", "XLA_FFI_Error_Create_Args"): {
        "struct_size": "", "extensions": "extension_start", "message": "", "code": "errc",
    },
    ("ffi_api", "XLA_FFI_Api"): {
        "struct_size": "", "extensions": "extension_start", "version": "api_version", "internal": "internal_api",
        "make_error": "XLA_FFI_Error_Create",
    },
    ("ffi_call", "XLA_FFI_CallFrame"): {
        "struct_size": "", "extensions": "extension_start", "api": "", "context": "ctx", "stage": "",
        "arguments": "args", "results": "rets", "attributes": "attrs",
    },
}  # fmt: skip
"""Ours and XLA's, and the fields by our names; XLA's is the same where it is empty."""

_RENAMED = {"XLA_FFI_Extension_Base": "XLA_FFI_InternalExtension"}
"""From jaxlib 0.11 on."""

_GROW = {"XLA_FFI_Metadata", "XLA_FFI_Api", "XLA_FFI_CallFrame"}
"""XLA makes these, and has appended fields that nothing here looks at."""

_NUMBERS = {
    "FFI_VERSION_MAJOR": "XLA_FFI_API_MAJOR",
    "FFI_EXTENSION_METADATA": "XLA_FFI_Extension_Metadata",
    "FFI_STAGE_EXECUTE": "XLA_FFI_ExecutionStage_EXECUTE",
    "FFI_ERROR_INTERNAL": "XLA_FFI_Error_Code_INTERNAL",
}


def _assertions() -> list[str]:
    found = []
    text = (Path(jax.ffi.include_dir()) / "xla/ffi/api/c_api.h").read_text()
    for (ours, theirs), fields in _STRUCTS.items():
        if (renamed := _RENAMED.get(theirs, theirs)) in text:
            theirs = renamed
        relation = "<=" if theirs in _GROW else "=="
        found.append(f"sizeof({ours}) {relation} sizeof({theirs})")
        for own, other in fields.items():
            other = other or own
            found.append(f"offsetof({ours}, {own}) == offsetof({theirs}, {other})")
            found.append(f"sizeof((({ours} *)0)->{own}) {relation} sizeof((({theirs} *)0)->{other})")
    found += [f"(int){ours} == (int){theirs}" for ours, theirs in _NUMBERS.items()]
    return [*found, "FFI_VERSION_MINOR <= XLA_FFI_API_MINOR"]


def _compile(folder: Path, assertions: list[str]) -> subprocess.CompletedProcess[str]:
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("there is no C compiler")
    lines = [f'_Static_assert({each}, "{each}");' for each in assertions]
    source = folder / "abi.c"
    source.write_text(f'#include "xla/ffi/api/c_api.h"\n#include "{_HEADER}"\n' + "\n".join(lines) + "\n")
    words = [compiler, "-std=c11", "-fsyntax-only", f"-I{jax.ffi.include_dir()}", str(source)]
    return subprocess.run(words, capture_output=True, text=True, check=False)


def test_every_size_offset_and_number_is_that_of_jaxlib(tmp_path: Path) -> None:
    done = _compile(tmp_path, _assertions())
    assert done.returncode == 0, done.stderr


def test_the_check_knows_every_struct_field_and_number() -> None:
    text = re.sub(r"/\*.*?\*/", "", _HEADER.read_text(), flags=re.DOTALL)
    declared: dict[str, set[str]] = {}
    for body, name in re.findall(r"typedef struct \w*\s*\{(.*?)\}\s*(\w+);", text, flags=re.DOTALL):
        for each in body.split(";"):
            if pointer := re.search(r"\(\*(\w+)\)", each):
                declared.setdefault(name, set()).add(pointer.group(1))
            elif each.strip():
                declared.setdefault(name, set()).update(re.findall(r"(\w+)\s*(?:,|$)", each.strip()))
    compared: dict[str, set[str]] = {}
    for (ours, _), fields in _STRUCTS.items():
        compared.setdefault(ours, set()).update(fields)
    assert declared == compared
    numbers = set(re.findall(r"(FFI_[A-Z_]+) =", text))
    assert numbers == {*_NUMBERS, "FFI_VERSION_MINOR"}


def test_the_check_notices_a_difference(tmp_path: Path) -> None:
    assert "static assertion failed" in _compile(tmp_path, ["sizeof(ffi_scalar) == 1"]).stderr
