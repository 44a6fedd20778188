"""The built extension module: nothing writable is executable, and one name is visible."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest

from pipecomm_ext import _C

PT_LOAD, PT_DYNAMIC, PT_GNU_STACK, PT_GNU_RELRO = 1, 2, 0x6474E551, 0x6474E552
DT_STRTAB, DT_SYMTAB, DT_TEXTREL, DT_FLAGS, DT_FLAGS_1 = 5, 6, 22, 30, 0x6FFFFFFB
DT_RPATH, DT_RUNPATH = 15, 29
DF_TEXTREL, DF_BIND_NOW, DF_1_NOW = 4, 8, 1
PF_X, PF_W = 1, 2
SHT_DYNSYM, SHN_UNDEF, STB_LOCAL = 11, 0, 0


class Elf:
    """The parts of a 64-bit little-endian ELF file that these tests check."""

    def __init__(self, path: Path):
        self.data = path.read_bytes()
        assert self.data[:6] == b"\x7fELF\x02\x01", f"{path} is no 64-bit little-endian ELF file"
        ph_offset, sh_offset = struct.unpack_from("<QQ", self.data, 32)
        ph_size, num_segments, sh_size, num_sections = struct.unpack_from("<4H", self.data, 54)
        # Segments: type, flags, offset, address, _, file size; sections: _, type, _, _, offset, size, link
        self.segments = [
            struct.unpack_from("<IIQQQQ", self.data, ph_offset + idx * ph_size) for idx in range(num_segments)
        ]
        self.sections = [
            struct.unpack_from("<IIQQQQI", self.data, sh_offset + idx * sh_size)
            for idx in range(num_sections)
        ]
        (dynamic,) = (segment for segment in self.segments if segment[0] == PT_DYNAMIC)
        self.dynamic = dict(struct.iter_unpack("<QQ", self.data[dynamic[2] : dynamic[2] + dynamic[5]]))

    def symbols(self) -> dict[str, bool]:
        """Names of the dynamic symbols, and whether they are defined here."""
        (table,) = (section for section in self.sections if section[1] == SHT_DYNSYM)
        names = self.sections[table[6]][4]
        symbols = {}
        for name, info, _, section, _, _ in struct.iter_unpack(
            "<IBBHQQ", self.data[table[4] : table[4] + table[5]]
        ):
            if info >> 4 != STB_LOCAL:
                text = self.data[names + name : self.data.index(b"\0", names + name)].decode()
                symbols[text] = section != SHN_UNDEF
        return symbols


@pytest.fixture(scope="module")
def module() -> Elf:
    return Elf(Path(_C.__file__))


def test_what_is_relocated_is_read_only_before_the_module_runs(module):
    assert any(segment[0] == PT_GNU_RELRO for segment in module.segments)
    flags, flags_1 = module.dynamic.get(DT_FLAGS, 0), module.dynamic.get(DT_FLAGS_1, 0)
    assert flags & DF_BIND_NOW or flags_1 & DF_1_NOW
    assert DT_TEXTREL not in module.dynamic and not flags & DF_TEXTREL


def test_no_memory_is_both_writable_and_executable(module):
    loaded = [segment for segment in module.segments if segment[0] in (PT_LOAD, PT_GNU_STACK)]
    assert [hex(segment[1]) for segment in loaded if segment[1] & PF_W and segment[1] & PF_X] == []
    assert any(segment[0] == PT_GNU_STACK for segment in module.segments)


def test_only_the_init_function_is_visible_from_outside(module):
    assert [name for name, is_defined in module.symbols().items() if is_defined] == ["PyInit__C"]


def test_stack_and_buffers_are_checked(module):
    imported = {name for name, is_defined in module.symbols().items() if not is_defined}
    assert "__stack_chk_fail" in imported
    assert any(name.startswith("__") and name.endswith("_chk") for name in imported), sorted(imported)


def test_no_path_of_the_building_machine_decides_what_is_loaded(module):
    assert DT_RPATH not in module.dynamic and DT_RUNPATH not in module.dynamic
