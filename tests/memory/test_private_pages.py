"""Pages of a private mapping that were written to are found; what cannot be known counts as written to."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from rlmesh.memory.native import PAGE_BYTES, Mapping, export, view_of
from rlmesh.memory.private_pages import PrivatePages

PAGES = 300


@pytest.fixture
def fd() -> Iterator[int]:
    fd = os.memfd_create("rlmesh-test")
    os.ftruncate(fd, PAGES * PAGE_BYTES)
    yield fd
    os.close(fd)


@pytest.fixture
def pages() -> Iterator[PrivatePages]:
    pages = PrivatePages()
    yield pages
    pages.close()


def _view(mapping: Mapping) -> memoryview:
    return view_of(export(mapping.address, mapping.nbytes, mapping))


def test_written_pages_are_found_and_read_ones_are_not(fd: int, pages: PrivatePages) -> None:
    assert pages.works
    mapping = Mapping.private(fd, 0, PAGES * PAGE_BYTES)
    view = _view(mapping)
    assert not pages.any(mapping.address, mapping.nbytes)
    assert not any(view)
    assert not pages.any(mapping.address, mapping.nbytes)
    for page in (0, 1, 7, PAGES - 1):
        view[page * PAGE_BYTES + 5] = 1
    found = [
        ((at - mapping.address) // PAGE_BYTES, n // PAGE_BYTES) for at, n in pages.runs(mapping.address, len(view))
    ]
    assert found == [(0, 2), (7, 1), (PAGES - 1, 1)]
    assert pages.any(mapping.address + 7 * PAGE_BYTES + 100, 1)
    assert not pages.any(mapping.address + 8 * PAGE_BYTES, PAGE_BYTES)
    assert not pages.any(mapping.address + 8 * PAGE_BYTES, 0)


def test_dropped_pages_show_the_file_again(fd: int, pages: PrivatePages) -> None:
    mapping = Mapping.private(fd, 0, PAGES * PAGE_BYTES)
    view = _view(mapping)
    view[:] = b"x" * len(view)
    os.pwrite(fd, b"new", 3 * PAGE_BYTES)
    assert view[3 * PAGE_BYTES] == ord("x")
    for at, length in pages.runs(mapping.address, mapping.nbytes):
        mapping.drop_private_pages(at - mapping.address, length)
    assert bytes(view[3 * PAGE_BYTES :][:3]) == b"new"
    assert not pages.any(mapping.address, mapping.nbytes)
    os.pwrite(fd, b"NEW", 3 * PAGE_BYTES)
    assert bytes(view[3 * PAGE_BYTES :][:3]) == b"NEW"


def test_many_scattered_pages_end_in_one_run_that_covers_them(fd: int, pages: PrivatePages) -> None:
    mapping = Mapping.private(fd, 0, PAGES * PAGE_BYTES)
    view = _view(mapping)
    written = set(range(0, PAGES - 1, 2))
    for page in written:
        view[page * PAGE_BYTES] = 1
    runs = list(pages.runs(mapping.address, mapping.nbytes))
    covered = {
        page
        for at, length in runs
        for page in range((at - mapping.address) // PAGE_BYTES, (at - mapping.address + length) // PAGE_BYTES)
    }
    assert len(runs) <= 64
    assert written <= covered
    assert PAGES - 1 not in covered


def test_without_a_page_table_every_page_counts_as_written(
    fd: int, pages: PrivatePages, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> bytes:
        raise PermissionError

    monkeypatch.setattr(pages, "_copied", refuse)
    assert not pages.works
    mapping = Mapping.private(fd, 0, PAGES * PAGE_BYTES)
    assert list(pages.runs(mapping.address + 10, PAGE_BYTES)) == [(mapping.address, 2 * PAGE_BYTES)]
    assert list(pages.runs(mapping.address, 0)) == []
