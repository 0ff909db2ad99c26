"""The streamed writer and the mapped reader agree with the `safetensors` library; damaged files are named."""

import json
import tempfile
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
from hypothesis import given
from hypothesis import strategies as st

from workflow_scripts.checkpoint.safetensors import DTYPES, SafetensorsWriter, map_tensor, read_header
from workflow_scripts.errors import UserError

# The library's numpy side cannot return these; they are compared by their bytes.
_BYTES_ONLY = {"BF16", "F8_E4M3", "F8_E5M2"}

shapes = st.lists(st.integers(0, 5), max_size=3).map(tuple)
names = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=8).filter(
    lambda n: n != "__metadata__"
)
layouts = st.dictionaries(names, st.tuples(st.sampled_from(sorted(DTYPES)), shapes), max_size=6)


def random_array(dtype, shape, seed):
    generator = np.random.default_rng(seed)
    count = int(np.prod(shape, dtype=int)) * DTYPES[dtype].itemsize
    data = generator.integers(0, 2 if dtype == "BOOL" else 256, count, dtype=np.uint8)
    return data.view(DTYPES[dtype]).reshape(shape)


def write(path, arrays, layout, rows=0):
    """Whole tensors, or blocks of `rows` rows where there is a first axis."""
    with SafetensorsWriter(path, layout) as writer:
        for name, array in arrays.items():
            if rows and array.ndim and len(array):
                for start in range(0, len(array), rows):
                    writer.append(name, array[start : start + rows])
            else:
                writer.write(name, array)


@given(layout=layouts, rows=st.integers(0, 3), seed=st.integers(0, 99))
def test_library_and_reader_read_what_is_written(layout, rows, seed):
    arrays = {name: random_array(dtype, shape, seed) for name, (dtype, shape) in layout.items()}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "a.safetensors"
        write(path, arrays, layout, rows)
        header = read_header(path)
        assert header.keys() == layout.keys()
        for name, array in arrays.items():
            mapped = map_tensor(header[name])
            assert (header[name].dtype, mapped.shape, mapped.dtype) == (*layout[name], array.dtype)
            assert mapped.tobytes() == array.tobytes()
        data = dict(safetensors.deserialize(path.read_bytes()))
        assert data.keys() == layout.keys()
        for name, (dtype, shape) in layout.items():
            assert (data[name]["dtype"], tuple(data[name]["shape"])) == (dtype, shape)
            assert bytes(data[name]["data"]) == arrays[name].tobytes()


@given(layout=layouts, seed=st.integers(0, 99))
def test_reader_reads_what_the_library_writes(layout, seed):
    arrays = {
        name: random_array(dtype, shape, seed)
        for name, (dtype, shape) in layout.items()
        if dtype not in _BYTES_ONLY
    }
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "a.safetensors"
        safetensors.numpy.save_file(arrays, path, metadata={"format": "pt"})
        header = read_header(path)
        assert header.keys() == arrays.keys()
        assert all(map_tensor(header[name]).tobytes() == array.tobytes() for name, array in arrays.items())


def test_bytes_do_not_depend_on_how_rows_arrive_or_lie(tmp_path):
    array = np.arange(60, dtype=np.float32).reshape(12, 5)
    layout = {"ä b": ("F32", (12, 5))}
    write(tmp_path / "whole", {"ä b": array}, layout)
    write(tmp_path / "rows", {"ä b": np.asfortranarray(array)}, layout, rows=5)
    assert (tmp_path / "whole").read_bytes() == (tmp_path / "rows").read_bytes()
    assert int.from_bytes((tmp_path / "whole").read_bytes()[:8], "little") % 8 == 0


def test_writing_to_a_mapped_tensor_leaves_the_file_alone(tmp_path):
    path = tmp_path / "a"
    write(path, {"x": np.ones(4, np.float32)}, {"x": ("F32", (4,))})
    before = path.read_bytes()
    mapped = map_tensor(read_header(path)["x"])
    mapped[:] = 7
    assert path.read_bytes() == before


class TestWriterRefuses:
    layout = {"a": ("F32", (4, 2)), "b": ("U8", (3,))}  # noqa: RUF012
    a = np.zeros((4, 2), np.float32)
    b = np.zeros(3, np.uint8)

    @pytest.mark.parametrize(
        "steps",
        [
            [],
            [("write", "a", a)],
            [("append", "a", a[:3])],
            [("append", "a", a[:3]), ("append", "a", a[:2])],
            [("append", "a", a[:3]), ("write", "a", a)],
            [("append", "a", a[:3]), ("write", "b", b)],
            [("write", "b", b)],
            [("write", "c", b)],
            [("write", "a", a.astype(np.float16))],
            [("write", "a", a.T)],
            [("append", "a", a[:, :1])],
            [("write", "a", a), ("write", "a", a)],
            [("write", "a", a), ("write", "b", b), ("write", "b", b)],
        ],
    )
    def test_what_was_not_declared(self, tmp_path, steps):
        with pytest.raises(ValueError, match=r"^[abc\w.]+: |next in the declared order"):  # noqa: SIM117
            with SafetensorsWriter(tmp_path / "file", self.layout) as writer:
                for method, name, array in steps:
                    getattr(writer, method)(name, array)

    def test_but_reports_the_first_problem(self, tmp_path):
        with pytest.raises(KeyboardInterrupt), SafetensorsWriter(tmp_path / "file", self.layout):
            raise KeyboardInterrupt


def file_with(path, header, data=b""):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path


def entry(dtype="F32", shape=(2,), offsets=(0, 8)):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


@pytest.mark.parametrize(
    ("header", "data", "words"),
    [
        ({"x": entry()}, bytes(4), "truncated"),
        ({"x": entry()}, bytes(12), "too long"),
        ({"x": entry()}, b"", "truncated"),
        ({"x": entry(shape=(3,))}, bytes(8), "tensor x"),
        ({"x": entry(dtype="Q4")}, bytes(8), "unknown dtype Q4"),
        ({"x": entry(), "y": entry(offsets=(4, 12))}, bytes(12), "overlaps"),
        ({"x": entry(), "y": entry(offsets=(12, 20))}, bytes(20), "gap"),
        ({"x": entry(offsets=(-8, 0))}, bytes(8), "tensor x is not readable"),
        ({"x": {"dtype": "F32"}}, bytes(8), "tensor x is not readable"),
        ({"x": 3}, bytes(8), "tensor x is not readable"),
        ([1], b"", "not readable JSON"),
        (b"{garbage", b"", "not readable JSON"),
        (b"\xff\xfe\x00", b"", "not readable JSON"),
        (
            b'{"x":{"dtype":"U8","shape":[0],"data_offsets":[0,0]},"x":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}}',
            b"",
            "JSON",
        ),
    ],
)
def test_damaged_files_are_named(tmp_path, header, data, words):
    path = file_with(tmp_path / "model with ü.safetensors", header, data)
    with pytest.raises(UserError) as problem:
        read_header(path)
    assert str(path) in str(problem.value) and words in str(problem.value)


@pytest.mark.parametrize("content", [b"", b"\x01\x02", b"<!DOCTYPE html><html>", bytes(8), b"\xff" * 64])
def test_what_is_no_safetensors_file_is_named(tmp_path, content):
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    with pytest.raises(UserError, match=r"model\.safetensors is not a"):
        read_header(path)


@given(cut=st.integers(0, 10_000))
def test_every_shortened_file_is_refused(cut):
    arrays = {"x": np.ones((3, 5), np.float32), "y": np.ones(7, np.int8)}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "a.safetensors"
        write(path, arrays, {"x": ("F32", (3, 5)), "y": ("I8", (7,))})
        whole = path.read_bytes()
        path.write_bytes(whole[: cut % len(whole)])
        with pytest.raises(UserError):
            read_header(path)


def test_missing_file_and_dangling_link(tmp_path):
    with pytest.raises(UserError, match="is missing"):
        read_header(tmp_path / "nothing")
    (tmp_path / "link").symlink_to("../blobs/gone")
    with pytest.raises(UserError, match="symlink to a file that is not there"):
        read_header(tmp_path / "link")
