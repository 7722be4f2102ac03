"""Safetensors headers that are cut off, lie, overlap or hide something: refused before memory is taken."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from spearfish.checkpoint.safefile import DTYPES, Entry, check_memory, find_tensors, read_header, read_tensor
from spearfish.errors import FormatError


def raw(path: Path, header: Any, data: bytes, length: int | None = None) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes((len(text) if length is None else length).to_bytes(8, "little") + text + data)
    return path


def about(dtype: str = "F32", shape: Any = (2,), offsets: Any = (0, 8)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


def test_reads_what_the_library_writes(tmp_path: Path) -> None:
    tensors = {f"t.{name}": torch.arange(6).reshape(2, 3).to(dtype) for name, dtype in DTYPES.items()}
    tensors["scalar"] = torch.tensor(3.5)
    tensors["empty"] = torch.empty(0, 4)
    save_file(tensors, tmp_path / "a.safetensors", metadata={"format": "pt"})
    header = read_header(tmp_path / "a.safetensors")
    assert set(header) == set(tensors)
    for name, tensor in tensors.items():
        found = read_tensor(header[name], name)
        assert found.dtype == tensor.dtype
        assert found.shape == tensor.shape
        assert torch.equal(found.reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8))


BAD = [
    ({"a": about()}, b"\0" * 7, "describes"),
    ({"a": about()}, b"\0" * 9, "appended"),
    ({"a": about(shape=(3,))}, b"\0" * 8, "shape .* needs 12 bytes"),
    ({"a": about(shape=(-2,))}, b"\0" * 8, "malformed shape"),
    ({"a": about(shape=(2.0,))}, b"\0" * 8, "malformed shape"),
    ({"a": about(shape=(1 << 61, 1 << 61))}, b"\0" * 8, "needs"),
    ({"a": about(dtype="F4")}, b"\0" * 8, "dtype 'F4' is not one of"),
    ({"a": {**about(), "dtype": ["F32"]}}, b"\0" * 8, "dtype"),
    ({"a": about(offsets=(0, 8, 16))}, b"\0" * 8, "data_offsets"),
    ({"a": about(offsets=(8, 0))}, b"\0" * 8, "data_offsets"),
    ({"a": about(), "b": about()}, b"\0" * 8, "overlaps"),
    ({"a": about(), "b": about(offsets=(12, 20))}, b"\0" * 20, "gap"),
    ({"a": 3}, b"", "no description"),
    ([1], b"", "not a JSON object"),
    (b'{"a": 1, "a": 2}', b"", "twice"),
    (b"{nonsense", b"", "not valid JSON"),
    (b"\xff\xfe", b"", "not valid JSON"),
    (b"[" * 100_000, b"", "not valid JSON"),
]


@pytest.mark.parametrize(("header", "data", "text"), BAD)
def test_bad_headers(tmp_path: Path, header: Any, data: bytes, text: str) -> None:
    file = raw(tmp_path / "a.safetensors", header, data)
    with pytest.raises(FormatError, match=text) as caught:
        read_header(file)
    assert "a.safetensors" in str(caught.value)


@pytest.mark.parametrize("length", [1 << 40, (1 << 64) - 1, 200, 99_999_999])
def test_a_header_longer_than_the_file(tmp_path: Path, length: int) -> None:
    with pytest.raises(FormatError, match="not a whole safetensors file"):
        read_header(raw(tmp_path / "a.safetensors", {"a": about()}, b"\0" * 8, length))


@pytest.mark.parametrize("size", range(9))
def test_a_file_of_a_few_bytes(tmp_path: Path, size: int) -> None:
    (tmp_path / "a.safetensors").write_bytes(b"\0" * size)
    with pytest.raises(FormatError):
        read_header(tmp_path / "a.safetensors")


def test_a_file_that_shrinks_after_the_look(tmp_path: Path) -> None:
    file = raw(tmp_path / "a.safetensors", {"a": about()}, b"\0" * 8)
    entry = read_header(file)["a"]
    file.write_bytes(file.read_bytes()[:-4])
    with pytest.raises(FormatError, match="4 of 8 bytes"):
        read_tensor(entry, "a")
    file.unlink()
    with pytest.raises(FormatError, match="cannot be read"):
        read_tensor(entry, "a")


def test_more_than_this_machine_has(tmp_path: Path) -> None:
    huge = Entry(tmp_path / "a.safetensors", torch.float32, (1 << 50,), 0, 1 << 52)
    with pytest.raises(FormatError, match="layer.q needs 4194304.0 GiB and this machine has"):
        read_tensor(huge, "layer.q")
    check_memory(1 << 20, "small")


def test_one_name_in_two_files(tmp_path: Path) -> None:
    for name in ("a", "b"):
        save_file({"x": torch.ones(1)}, tmp_path / f"{name}.safetensors")
    with pytest.raises(FormatError, match="x is in both a.safetensors and b.safetensors"):
        find_tensors(tmp_path)
