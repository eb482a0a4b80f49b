#include "server/keeper/startup_pages.h"

#include <link.h>
#include <sys/mman.h>
#include <unistd.h>

namespace weightbroker {
namespace {

int ForgetObject(dl_phdr_info* object, size_t, void*) {
  const auto page = static_cast<ElfW(Addr)>(sysconf(_SC_PAGESIZE));
  for (int i = 0; i < object->dlpi_phnum; ++i) {
    const ElfW(Phdr)& segment = object->dlpi_phdr[i];
    // Writable segments hold what has been written, which is nowhere else.
    if (segment.p_type != PT_LOAD || (segment.p_flags & PF_W) != 0) continue;
    const ElfW(Addr) begin = (object->dlpi_addr + segment.p_vaddr) / page * page;
    const ElfW(Addr) end = object->dlpi_addr + segment.p_vaddr + segment.p_memsz;
    // Advice: where it is not taken (the vDSO), nothing is lost but memory.
    madvise(reinterpret_cast<void*>(begin), end - begin, MADV_DONTNEED);
  }
  return 0;
}

}  // namespace

void ForgetStartupPages() { dl_iterate_phdr(ForgetObject, nullptr); }

}  // namespace weightbroker
