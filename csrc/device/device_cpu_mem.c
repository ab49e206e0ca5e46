/* device_cpu_mem.c - memory of the cpu device: memfds behind reserved addresses.
 *
 * DESIGN. A reservation is an inaccessible mapping that costs no memory. A physical object is a memfd;
 * mapping a part of it over a reservation (MAP_FIXED) puts its pages there, and any number of addresses, in
 * any number of processes, may show the same pages. Unmapping puts the inaccessible mapping back, so the
 * addresses stay ours. Exported objects are sealed against shrinking: a peer cannot make our loads fault.
 *
 * Books: an object counts with its bytes in the process that opened it until its last mapping is gone;
 * imports and reservations count as blocks without bytes.
 *
 * Allocations carry a header in front of the payload. Large ones are mappings of their own whose payload
 * starts on a huge page, which is asked for. */
#define _GNU_SOURCE 1
#include "device/internal.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

enum { ALIGN = 256, HUGE_PAGE = 2 * 1024 * 1024, MAP_FROM_BYTES = 128 * 1024 };

static size_t page_bytes(void)
{
    return (size_t)sysconf(_SC_PAGESIZE);
}

/* ---- addresses -------------------------------------------------------------------------------------- */

/* Maps `bytes` so that the address plus `lead` is a multiple of `align`; the surplus is given back. */
static zx_status map_aligned(size_t bytes, size_t lead, size_t align, int prot, void **out)
{
    size_t surplus = align > page_bytes() ? align : 0;
    int flags = MAP_PRIVATE | MAP_ANONYMOUS | (prot == PROT_NONE ? MAP_NORESERVE : 0);
    ZX_TRY(zx_fault_point("mmap"));
    char *base = mmap(NULL, bytes + surplus, prot, flags, -1, 0);
    if (base == MAP_FAILED) {
        if (errno == ENOMEM)
            ZX_FAIL(ZX_ERR_NOMEM, "cannot map %zu bytes of memory: the system has no room for them", bytes + surplus);
        ZX_FAIL_SYS(errno, "mmap", "cannot map %zu bytes of memory", bytes + surplus);
    }
    if (surplus > 0) {
        size_t skip = (align - ((uintptr_t)base + lead) % align) % align;
        if (skip > 0) munmap(base, skip);
        if (surplus > skip) munmap(base + skip + bytes, surplus - skip);
        base += skip;
    }
    *out = base;
    return ZX_OK;
}

zx_status zx_cpu_reserve(zx_device *dev, size_t bytes, void **out_addr)
{
    (void)dev;
    *out_addr = NULL;
    ZX_TRY(map_aligned(bytes, 0, bytes >= HUGE_PAGE ? HUGE_PAGE : page_bytes(), PROT_NONE, out_addr));
    zx_mem_account(ZX_MEM_DEVICE, 1, 0);
    return ZX_OK;
}

void zx_cpu_unreserve(zx_device *dev, void *addr, size_t bytes)
{
    if (munmap(addr, bytes) != 0)
        zx_log(ZX_LOG_ERROR, "cannot give back %zu bytes of addresses at %p on device '%s': %s", bytes, addr,
               dev->caps.name, strerror(errno));
    zx_mem_account(ZX_MEM_DEVICE, -1, 0);
}

zx_status zx_cpu_map(zx_device *dev, void *addr, zx_mem *mem, size_t offset, size_t bytes)
{
    (void)dev;
    if (mem->fd < 0) ZX_FAIL(ZX_ERR_STATE, "cannot map a memory object that is closed");
    ZX_TRY(zx_fault_point("mmap"));
    void *at = mmap(addr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, mem->fd, (off_t)offset);
    if (at == MAP_FAILED) ZX_FAIL_SYS(errno, "mmap", "cannot map %zu bytes of a memory object at %p", bytes, addr);
    /* A hint: kernels that do not offer huge pages for shared memory refuse, and nothing is lost. */
    if (bytes >= HUGE_PAGE) (void)madvise(addr, bytes, MADV_HUGEPAGE);
    return ZX_OK;
}

zx_status zx_cpu_unmap(zx_device *dev, void *addr, size_t bytes)
{
    (void)dev;
    ZX_TRY(zx_fault_point("mmap"));
    void *at = mmap(addr, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
    if (at == MAP_FAILED) ZX_FAIL_SYS(errno, "mmap", "cannot unmap %zu bytes at %p", bytes, addr);
    return ZX_OK;
}

/* ---- objects ---------------------------------------------------------------------------------------- */

static zx_status size_and_seal(int fd, size_t bytes)
{
    ZX_TRY(zx_fault_point("ftruncate"));
    if (ftruncate(fd, (off_t)bytes) != 0)
        ZX_FAIL_SYS(errno, "ftruncate", "cannot size a memory object to %zu bytes", bytes);
    if (fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW) != 0)
        ZX_FAIL_SYS(errno, "F_ADD_SEALS", "cannot seal a memory object of %zu bytes", bytes);
    return ZX_OK;
}

zx_status zx_cpu_mem_open(zx_mem *mem)
{
    zx_status zx_rc_ = ZX_OK;
    size_t total = mem->dev->caps.total_bytes;
    if (mem->bytes > total)
        ZX_FAIL(ZX_ERR_NOMEM, "a memory object of %zu bytes exceeds the memory of this machine, %zu bytes", mem->bytes,
                total);
    ZX_TRY(zx_fault_point("memfd_create"));
    int fd = memfd_create("zerox", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    if (fd < 0) ZX_FAIL_SYS(errno, "memfd_create", "cannot create a memory object of %zu bytes", mem->bytes);
    ZX_TRY_GOTO(size_and_seal(fd, mem->bytes), fail);
    mem->fd = fd;
    zx_mem_account(ZX_MEM_DEVICE, 1, (int64_t)mem->bytes);
    return ZX_OK;
fail:
    close(fd);
    return zx_rc_;
}

static zx_status check_import(int fd, size_t bytes)
{
    struct stat st;
    if (fstat(fd, &st) != 0) ZX_FAIL_SYS(errno, "fstat", "cannot import descriptor %d", fd);
    int seals = fcntl(fd, F_GET_SEALS);
    if (seals < 0 || (seals & F_SEAL_SHRINK) == 0)
        ZX_FAIL(ZX_ERR_ARG, "cannot import descriptor %d: it is not an exported memory object", fd);
    if ((uint64_t)st.st_size < bytes)
        ZX_FAIL(ZX_ERR_ARG, "cannot import %zu bytes from descriptor %d: the object has %lld", bytes, fd,
                (long long)st.st_size);
    return ZX_OK;
}

static zx_status duplicate(int fd, int *out)
{
    *out = -1;
    ZX_TRY(zx_fault_point("dup"));
    int copy = fcntl(fd, F_DUPFD_CLOEXEC, 0);
    if (copy < 0) ZX_FAIL_SYS(errno, "F_DUPFD_CLOEXEC", "cannot duplicate descriptor %d", fd);
    *out = copy;
    return ZX_OK;
}

zx_status zx_cpu_mem_import(zx_mem *mem, int fd)
{
    ZX_TRY(check_import(fd, mem->bytes));
    ZX_TRY(duplicate(fd, &mem->fd));
    zx_mem_account(ZX_MEM_DEVICE, 1, 0);
    return ZX_OK;
}

zx_status zx_cpu_mem_export(zx_mem *mem, int *out_fd)
{
    ZX_TRY(duplicate(mem->fd, out_fd));
    return ZX_OK;
}

void zx_cpu_mem_close(zx_mem *mem)
{
    close(mem->fd);
    mem->fd = -1;
}

void zx_cpu_mem_release(zx_mem *mem)
{
    zx_mem_account(ZX_MEM_DEVICE, -1, mem->imported ? 0 : -(int64_t)mem->bytes);
}

/* ---- allocations ------------------------------------------------------------------------------------ */

static const uint64_t MAGIC_HEAP = 0x7a782d6465762d68u;
static const uint64_t MAGIC_MAP = 0x7a782d6465762d6du;

typedef struct header {
    uint64_t magic;
    void *raw;
    size_t raw_bytes; /* of the mapping */
    size_t bytes;
} header;

_Static_assert(sizeof(header) <= ALIGN, "the header lies in front of the payload");

static header *header_of(void *payload)
{
    return (header *)(void *)((char *)payload - ALIGN);
}

static zx_status alloc_mapped(size_t bytes, header *h, char **out)
{
    size_t page = page_bytes();
    size_t raw_bytes = page + (size_t)zx_round_up((int64_t)bytes, (int64_t)page);
    bool huge = bytes >= 2 * (size_t)HUGE_PAGE;
    void *raw = NULL;
    ZX_TRY(map_aligned(raw_bytes, page, huge ? HUGE_PAGE : page, PROT_READ | PROT_WRITE, &raw));
    char *payload = (char *)raw + page;
    if (huge) (void)madvise(payload, raw_bytes - page, MADV_HUGEPAGE); /* a hint */
    *h = (header){.magic = MAGIC_MAP, .raw = raw, .raw_bytes = raw_bytes, .bytes = bytes};
    *out = payload;
    return ZX_OK;
}

static zx_status alloc_heap(size_t bytes, header *h, char **out)
{
    ZX_TRY(zx_fault_point("aligned_alloc"));
    size_t raw_bytes = ALIGN + (size_t)zx_round_up((int64_t)bytes, ALIGN);
    char *raw = aligned_alloc(ALIGN, raw_bytes);
    if (raw == NULL) ZX_FAIL(ZX_ERR_NOMEM, "cannot allocate %zu bytes of device memory", bytes);
    memset(raw, 0, raw_bytes);
    *h = (header){.magic = MAGIC_HEAP, .raw = raw, .raw_bytes = raw_bytes, .bytes = bytes};
    *out = raw + ALIGN;
    return ZX_OK;
}

zx_status zx_cpu_alloc(zx_device *dev, size_t bytes, void **out)
{
    header h;
    char *payload = NULL;
    *out = NULL;
    if (bytes > dev->caps.total_bytes)
        ZX_FAIL(ZX_ERR_NOMEM, "an allocation of %zu bytes exceeds the memory of this machine, %zu bytes", bytes,
                dev->caps.total_bytes);
    ZX_TRY(bytes >= MAP_FROM_BYTES ? alloc_mapped(bytes, &h, &payload) : alloc_heap(bytes, &h, &payload));
    *header_of(payload) = h;
    zx_mem_account(ZX_MEM_DEVICE, 1, (int64_t)bytes);
    *out = payload;
    return ZX_OK;
}

bool zx_cpu_free(zx_device *dev, void *ptr)
{
    header h = *header_of(ptr);
    if (h.magic != MAGIC_HEAP && h.magic != MAGIC_MAP) {
        zx_log(ZX_LOG_ERROR, "zx_device_free(%p) on device '%s': not an allocation, or its header was overwritten", ptr,
               dev->caps.name);
        return false;
    }
    zx_mem_account(ZX_MEM_DEVICE, -1, -(int64_t)h.bytes);
    header_of(ptr)->magic = 0;
    if (h.magic == MAGIC_MAP)
        munmap(h.raw, h.raw_bytes);
    else
        free(h.raw);
    return true;
}

/* ---- how much there is ------------------------------------------------------------------------------ */

/* The limit of the control group, if there is one: containers have less than the machine. */
static size_t cgroup_limit(void)
{
    size_t limit = SIZE_MAX;
    FILE *f = fopen("/sys/fs/cgroup/memory.max", "re");
    if (f == NULL) return limit;
    unsigned long long value;
    if (fscanf(f, "%llu", &value) == 1) limit = (size_t)value; /* "max" is not a number */
    fclose(f);
    return limit;
}

size_t zx_cpu_total_bytes(void)
{
    long n_pages = sysconf(_SC_PHYS_PAGES);
    size_t machine = n_pages > 0 ? (size_t)n_pages * page_bytes() : (size_t)PTRDIFF_MAX;
    size_t limit = cgroup_limit();
    return machine < limit ? machine : limit;
}
