"""The GGUF reader on files that are right, with the `gguf` package as oracle, and on files that are not."""

from __future__ import annotations

import logging
import re
import struct

import gguf
import numpy as np
import pytest

from spolia.errors import ModelError
from spolia.kernels.quants import TYPES, dequantize, quantize
from spolia.models.gguf import read_gguf

from .tiny import write_gguf

METADATA = {"general.architecture": "x", "a": 1, "b": -2.5, "c": True, "d": ["", "é", "z" * 300], "e": [1, 2, 3]}


def matrix(type_name="F32", name="w", rows=3):
    return quantize(np.random.default_rng(0).standard_normal((rows, 256)), type_name, name)


def test_metadata_and_tensors_are_those_written(tmp_path):
    tensors = {name: matrix(name, name) for name in TYPES} | {"norm": quantize(np.arange(5), "F32", "norm")}
    read = read_gguf(write_gguf(tmp_path / "m.gguf", METADATA, tensors))

    assert read.metadata == METADATA
    assert list(read.tensors) == list(tensors)
    for name, weight in tensors.items():
        found = read.tensors[name]
        assert (found.name, found.type, found.shape) == (name, weight.type, weight.shape)
        np.testing.assert_array_equal(found.data, weight.data)


def test_a_file_of_the_gguf_package_reads_the_same(tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_uint64("u64", 2**40)
    writer.add_int8("i8", -5)
    writer.add_float64("f64", 0.1)
    writer.add_bool("yes", True)
    writer.add_array("floats", [0.5, 1.5])
    writer.add_array("strings", ["a", "bc"])
    values = np.random.default_rng(1).standard_normal((2, 3, 32)).astype(np.float32)
    writer.add_tensor("cube", values)
    writer.add_tensor("half", values[0].astype(np.float16))
    writer.add_tensor(
        "q8", gguf.quants.quantize(values, gguf.GGMLQuantizationType.Q8_0), raw_dtype=gguf.GGMLQuantizationType.Q8_0
    )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()

    read = read_gguf(tmp_path / "m.gguf")

    assert {k: v for k, v in read.metadata.items() if k != "general.architecture"} == {
        "u64": 2**40, "i8": -5, "f64": 0.1, "yes": True, "floats": [0.5, 1.5], "strings": ["a", "bc"],
    }  # fmt: skip
    np.testing.assert_array_equal(dequantize(read.tensors["cube"]), values)
    np.testing.assert_array_equal(dequantize(read.tensors["half"]), values[0].astype(np.float16).astype(np.float32))
    assert read.tensors["q8"].shape == (2, 3, 32)
    assert np.abs(dequantize(read.tensors["q8"]) - values).max() < 0.02


@pytest.mark.parametrize("version", [2, 3])
@pytest.mark.parametrize("alignment", [1, 64])
def test_versions_and_alignments(tmp_path, version, alignment):
    tensors = {"v": quantize(np.arange(3), "F32", "v"), "w": matrix()}
    metadata = {"general.alignment": alignment}
    read = read_gguf(write_gguf(tmp_path / "m.gguf", metadata, tensors, version=version, alignment=alignment))
    np.testing.assert_array_equal(read.tensors["w"].data, tensors["w"].data)


def test_data_is_mapped_and_not_read(tmp_path):
    weight = read_gguf(write_gguf(tmp_path / "m.gguf", {}, {"w": matrix()})).tensors["w"]
    assert not weight.data.flags.owndata
    assert not weight.data.flags.writeable


def test_the_first_of_two_equal_keys_counts_and_is_told(tmp_path, caplog):
    path = write_gguf(tmp_path / "m.gguf", {"k1": 1, "k2": 2}, {})
    path.write_bytes(path.read_bytes().replace(b"k2", b"k1"))
    with caplog.at_level(logging.WARNING):
        assert read_gguf(path).metadata == {"k1": 1}
    assert "'k1' is there twice" in caplog.text


def shards(tmp_path, *, number=0, total=2):
    for n, name in enumerate("ab"):
        metadata = {"split.no": n + number, "split.count": 2, "split.tensors.count": total, "part": n}
        write_gguf(tmp_path / f"m-0000{n + 1}-of-00002.gguf", metadata, {name: matrix(name=name, rows=n + 1)})
    return tmp_path / "m-00001-of-00002.gguf", tmp_path / "m-00002-of-00002.gguf"


@pytest.mark.parametrize("named", [0, 1])
def test_naming_any_shard_reads_them_all(tmp_path, named):
    paths = shards(tmp_path)
    read = read_gguf(paths[named])
    assert read.paths == paths
    assert read.metadata["part"] == 0
    assert {name: weight.shape for name, weight in read.tensors.items()} == {"a": (1, 256), "b": (2, 256)}


def test_shards_that_do_not_belong_together_are_refused(tmp_path):
    shards(tmp_path, number=1)
    with pytest.raises(ModelError, match=r"is shard 1 of 2 \(from 0\), expected 0 of 2"):
        read_gguf(tmp_path / "m-00001-of-00002.gguf")
    shards(tmp_path, total=3)
    with pytest.raises(ModelError, match=r"hold 2 tensors, split\.tensors\.count says 3"):
        read_gguf(tmp_path / "m-00001-of-00002.gguf")
    (tmp_path / "m-00002-of-00002.gguf").unlink()
    with pytest.raises(ModelError, match=r"m-00002-of-00002\.gguf: no such file"):
        read_gguf(tmp_path / "m-00001-of-00002.gguf")


def test_a_shard_under_another_name_is_refused(tmp_path):
    shards(tmp_path)[0].rename(tmp_path / "renamed.gguf")
    with pytest.raises(ModelError, match=r"is shard 0 of 2 .* expected 0 of 1"):
        read_gguf(tmp_path / "renamed.gguf")


def test_a_tensor_in_two_shards_is_refused(tmp_path):
    first, second = shards(tmp_path)
    write_gguf(second, {"split.no": 1, "split.count": 2}, {"a": matrix(name="a")})
    with pytest.raises(ModelError, match="tensor 'a' is in an earlier shard too"):
        read_gguf(first)


def header(num_tensors=0, num_keys=0, version=3):
    return b"GGUF" + struct.pack("<IQQ", version, num_tensors, num_keys)


def key(value_type, *numbers):
    """A file with one key `k`, of that value type, and then numbers: u32 first, then u64."""
    layout = f"<Q1sI{'I' if numbers else ''}{'Q' * (len(numbers) - 1)}"
    return header(num_keys=1) + struct.pack(layout, 1, b"k", value_type, *numbers)


def tensor(dims=(256, 3), type_id=0, offset=0):
    """A file with one tensor `w`, less its data."""
    return header(num_tensors=1) + struct.pack(f"<Q1sI{len(dims)}QIQ", 1, b"w", len(dims), *dims, type_id, offset)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "it is empty"),
        (b"PK\x03\x04", r"it begins with b'PK\x03\x04', expected b'GGUF'"),
        (b"GGUF\x03", "truncated or corrupt in the header"),
        (header(version=1), "version 1 is not supported"),
        (header(version=3 << 24), "big-endian"),
        (header(num_tensors=2**63), "truncated or corrupt in tensor 1 of 9223372036854775808"),
        (header(num_keys=2**63), "truncated or corrupt in metadata key 1 of 9223372036854775808"),
        (header(num_keys=1) + struct.pack("<Q", 2**62), "4611686018427387904 bytes expected at byte 32, 0 left"),
        (header(num_keys=1) + struct.pack("<Q1s", 1, b"\xff"), "not UTF-8, at byte 32"),
        (key(13), "metadata key 'k' has value type 13"),
        (key(9, 8, 2**61), "truncated or corrupt in metadata key 'k'"),
        (key(9, 4, 2**61), "truncated or corrupt in metadata key 'k'"),
        (key(9, 9, 1), "is an array of value type 9"),
        (tensor(type_id=10), "tensor 'w' is of type Q2_K (number 10); supported are F32, F16, BF16, Q4_0"),
        (tensor(type_id=99), "tensor 'w' is of type unknown (number 99)"),
        (tensor((100, 3), type_id=12), "tensor 'w': a row of 100 values is no multiple of Q4_K's blocks of 256"),
        (tensor((1, 1, 1, 1, 1)), "tensor 'w' has 5 dimensions, expected 1 to 4"),
        (tensor((4, 0)), "tensor 'w' of shape [0, 4] is empty"),
        (tensor(offset=32), "tensor 'w' lies at offset 32 of the data, expected 0"),
        (tensor() + bytes(300), "truncated in tensor 'w' (F32 [3, 256]): the file has 365 bytes, it needs 3168"),
        (tensor((2**62, 2**62)), "truncated in tensor 'w'"),
    ],
)
def test_a_broken_file_is_told_in_one_line(tmp_path, content, message):
    path = tmp_path / "m.gguf"
    path.write_bytes(content)
    with pytest.raises(ModelError) as caught:
        read_gguf(path)
    told = str(caught.value)
    assert told.startswith(str(path))
    assert message in told
    assert "\n" not in told


def test_a_tensor_named_twice_is_refused(tmp_path):
    path = write_gguf(tmp_path / "m.gguf", {}, {"w1": matrix(), "w2": matrix()})
    path.write_bytes(path.read_bytes().replace(b"w2", b"w1"))
    with pytest.raises(ModelError, match="tensor 'w1' is there twice"):
        read_gguf(path)


@pytest.mark.parametrize("alignment", [0, -32, 24, "wide"])
def test_a_senseless_alignment_is_refused(tmp_path, alignment):
    with pytest.raises(ModelError, match=re.escape(f"general.alignment is {alignment!r}")):
        read_gguf(write_gguf(tmp_path / "m.gguf", {"general.alignment": alignment}, {}))


def test_what_is_no_file_is_refused(tmp_path):
    with pytest.raises(ModelError, match="no such file"):
        read_gguf(tmp_path / "absent.gguf")
    with pytest.raises(ModelError, match="cannot be read: Is a directory"):
        read_gguf(tmp_path)
