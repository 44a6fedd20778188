// The functions that a shared object imports, as the entries of its global offset table. Others may take
// their places, which then see the calls of this object, and no other ones: gloo's, torch's and Python's
// own calls go where they always went.
#pragma once

#include <dlfcn.h>
#include <link.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstddef>
#include <cstdint>

// Calls visit(name, place of the address) for every function that the loaded object imports.
template <class Visit>
bool for_each_import(const char* path, Visit visit) {
  link_map* object = nullptr;
  void* const handle = dlopen(path, RTLD_LAZY | RTLD_NOLOAD);
  if (!handle || dlinfo(handle, RTLD_DI_LINKMAP, &object) != 0) return false;
  const char* names = nullptr;
  const ElfW(Sym)* symbols = nullptr;
  struct {
    const ElfW(Rela) * first;
    size_t num_bytes;
  } tables[2]{};
  for (const ElfW(Dyn)* entry = object->l_ld; entry->d_tag != DT_NULL; ++entry) {
    const auto at = reinterpret_cast<const void*>(entry->d_un.d_ptr);
    if (entry->d_tag == DT_STRTAB) names = static_cast<const char*>(at);
    if (entry->d_tag == DT_SYMTAB) symbols = static_cast<const ElfW(Sym)*>(at);
    if (entry->d_tag == DT_RELA) tables[0].first = static_cast<const ElfW(Rela)*>(at);
    if (entry->d_tag == DT_RELASZ) tables[0].num_bytes = entry->d_un.d_val;
    if (entry->d_tag == DT_JMPREL) tables[1].first = static_cast<const ElfW(Rela)*>(at);
    if (entry->d_tag == DT_PLTRELSZ) tables[1].num_bytes = entry->d_un.d_val;
  }
  for (const auto& [first, num_bytes] : tables) {
    for (size_t idx = 0; idx < num_bytes / sizeof *first; ++idx) {
      const ElfW(Sym) & symbol = symbols[ELF64_R_SYM(first[idx].r_info)];
      if (symbol.st_shndx == SHN_UNDEF && symbol.st_name != 0)
        visit(names + symbol.st_name,
              reinterpret_cast<void**>(object->l_addr + first[idx].r_offset));
    }
  }
  dlclose(handle);
  return true;
}

inline void replace_import(void** place, void* function) {
  const auto page_bytes = static_cast<uintptr_t>(getpagesize());
  const auto page = reinterpret_cast<uintptr_t>(place) & ~(page_bytes - 1);
  mprotect(reinterpret_cast<void*>(page), page_bytes, PROT_READ | PROT_WRITE);
  *place = function;
}
