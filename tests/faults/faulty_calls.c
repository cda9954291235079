// Preloaded into a process: its nth call of some kinds fails, is cut short, or kills the process.
//
// It may also play a disk for direct I/O, wherever the files lie: descriptors with O_DIRECT then go
// through the page cache, but refuse what does not lie at whole pages, and no file is in the cache.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdint.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

enum mode {
  OFF,
  COUNT,
  KILL_BEFORE,
  KILL_WITHIN,
  KILL_AFTER,
  FAIL_EIO,
  FAIL_ENOSPC,
  FAIL_EINTR,
  FAIL_EINVAL,
  SHORT,        // and the next fails, as on a disk that fills up
  SHORT_ODD,    // at no whole page
  SHORT_PAGES,  // at a whole page
};

// What a call is; a call that is to be struck has all of the kinds that are wanted.
enum kinds { CHANGES = 1, WRITES = 2, READS = 4, INTERRUPTIBLE = 8, DIRECT = 16 };

enum { PAGE = 4096, MOST_FILES = 1024, MOST_TRACED = 1 << 16 };

static atomic_int mode;
static atomic_int wanted;
static atomic_long calls;
static atomic_long first;
static atomic_long last;
static atomic_uchar trace[MOST_TRACED];
static atomic_int plays_disk;
static atomic_uchar is_direct[MOST_FILES];

// Strikes the calls of these kinds with numbers from begin to end.
void faults_arm(int new_mode, int kinds, long begin, long end) {
  mode = OFF;
  wanted = kinds;
  calls = 0;
  first = begin;
  last = end;
  mode = new_mode;
}

// How many calls of the kinds there were.
long faults_disarm(void) {
  mode = OFF;
  return calls;
}

// The kinds of a counted call.
int faults_traced(long number) { return trace[number]; }

void faults_play_disk(void) { plays_disk = 1; }

static enum mode strike(int kinds) {
  if (mode == OFF || (kinds & wanted) != wanted) return OFF;
  const long number = atomic_fetch_add(&calls, 1);
  if (mode == COUNT && number < MOST_TRACED) trace[number] = (unsigned char)kinds;
  if (mode == COUNT || number < first || number > last) return OFF;
  if (mode == KILL_BEFORE) kill(getpid(), SIGKILL);
  return mode;
}

// Whether the call fails; sets errno.
static int fails(enum mode struck) {
  switch (struck) {
    case FAIL_EIO:
      errno = EIO;
      return 1;
    case FAIL_ENOSPC:
      errno = ENOSPC;
      return 1;
    case FAIL_EINTR:
      errno = EINTR;
      return 1;
    case FAIL_EINVAL:
      errno = EINVAL;
      return 1;
    default:
      return 0;
  }
}

static void finish(enum mode struck) {
  if (struck == KILL_AFTER || struck == KILL_WITHIN) kill(getpid(), SIGKILL);
}

// How much of a transfer is made.
static size_t part_of(size_t size, enum mode struck) {
  switch (struck) {
    case SHORT:
    case KILL_WITHIN:
      return size / 2;
    case SHORT_ODD:
      return size / 2 | 1;
    case SHORT_PAGES:
      return size < 2 * PAGE ? size : size / 2 / PAGE * PAGE;
    default:
      return size;
  }
}

static int is_marked(int file) { return file >= 0 && file < MOST_FILES && is_direct[file]; }

static void mark(int file, int flags) {
  if (file >= 0 && file < MOST_FILES) is_direct[file] = plays_disk && (flags & O_DIRECT) != 0;
}

// Flags for the system, which may know no direct I/O there.
static int played(int flags) { return plays_disk ? flags & ~O_DIRECT : flags; }

static int direct_kind(int file) {
  const int flags = ((__typeof__(&fcntl))dlsym(RTLD_NEXT, "fcntl"))(file, F_GETFL);
  return is_marked(file) || (flags >= 0 && (flags & O_DIRECT) != 0) ? DIRECT : 0;
}

static int lies_askew(const void* bytes, size_t size, off_t offset) {
  return (uintptr_t)bytes % PAGE != 0 || size % PAGE != 0 || offset % PAGE != 0;
}

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

#define CALL(kinds, name, ...)                                                \
  const enum mode struck = strike(kinds);                                     \
  if (fails(struck)) return -1;                                               \
  const __typeof__(REAL(name)(__VA_ARGS__)) result = REAL(name)(__VA_ARGS__); \
  finish(struck);                                                             \
  return result

int fsync(int file) { CALL(CHANGES | INTERRUPTIBLE, fsync, file); }
int fdatasync(int file) { CALL(CHANGES | INTERRUPTIBLE, fdatasync, file); }
int rename(const char* from, const char* to) { CALL(CHANGES, rename, from, to); }
int mkdir(const char* path, mode_t rights) { CALL(CHANGES, mkdir, path, rights); }
int link(const char* from, const char* to) { CALL(CHANGES, link, from, to); }
int unlink(const char* path) { CALL(CHANGES, unlink, path); }
int unlinkat(int folder, const char* path, int flags) {
  CALL(CHANGES, unlinkat, folder, path, flags);
}
int rmdir(const char* path) { CALL(CHANGES, rmdir, path); }

// ---- writing -----------------------------------------------------------------------------------

// The next write fails.
static void fill_up(void) {
  first = last = calls;
  mode = FAIL_ENOSPC;
}

ssize_t writev(int file, const struct iovec* parts, int count) {
  const enum mode struck = strike(CHANGES | WRITES | INTERRUPTIBLE | direct_kind(file));
  if (fails(struck)) return -1;
  size_t size = 0;
  for (int i = 0; i < count; ++i) size += parts[i].iov_len;
  for (int i = 0; i < count && is_marked(file); ++i) {
    const off_t place = i == 0 ? lseek(file, 0, SEEK_CUR) : 0;
    if (lies_askew(parts[i].iov_base, parts[i].iov_len, place)) return errno = EINVAL, -1;
  }
  const size_t most = part_of(size, struck);
  ssize_t result = 0;
  if (most == size) {
    result = REAL(writev)(file, parts, count);
  } else {
    for (size_t done = 0; done < most; ++parts) {
      const size_t n = parts->iov_len < most - done ? parts->iov_len : most - done;
      const ssize_t now = REAL(write)(file, parts->iov_base, n);
      if (now != (ssize_t)n) return -1;
      done += n;
    }
    result = (ssize_t)most;
  }
  if (struck == SHORT) fill_up();
  finish(struck);
  return result;
}

ssize_t write(int file, const void* bytes, size_t size) {
  const struct iovec part = {(void*)bytes, size};
  return writev(file, &part, 1);
}

ssize_t pwrite(int file, const void* bytes, size_t size, off_t offset) {
  const enum mode struck = strike(CHANGES | WRITES | INTERRUPTIBLE);
  if (fails(struck)) return -1;
  const ssize_t result = REAL(pwrite)(file, bytes, part_of(size, struck), offset);
  if (struck == SHORT) fill_up();
  finish(struck);
  return result;
}

ssize_t pwrite64(int file, const void* bytes, size_t size, off_t offset) {
  return pwrite(file, bytes, size, offset);
}

// ---- reading -----------------------------------------------------------------------------------

ssize_t pread(int file, void* bytes, size_t size, off_t offset) {
  const enum mode struck = strike(READS | INTERRUPTIBLE | direct_kind(file));
  if (fails(struck)) return -1;
  if (is_marked(file) && lies_askew(bytes, size, offset)) return errno = EINVAL, -1;
  return REAL(pread)(file, bytes, part_of(size, struck), offset);
}

ssize_t pread64(int file, void* bytes, size_t size, off_t offset) {
  return pread(file, bytes, size, offset);
}

// Asks whether the page cache has something.
ssize_t preadv2(int file, const struct iovec* parts, int count, off_t offset, int flags) {
  if (plays_disk) return errno = EAGAIN, -1;
  return REAL(preadv2)(file, parts, count, offset, flags);
}

// ---- opening -----------------------------------------------------------------------------------

static int open_kinds(int flags) {
  if ((flags & O_CREAT) != 0) return CHANGES | INTERRUPTIBLE;
  // Of those that only read: files of checkpoints, not what an interpreter reads for itself.
  const int kinds = (flags & O_DIRECT) != 0 ? READS | DIRECT : 0;
  return (flags & O_NOFOLLOW) != 0 ? kinds | READS | INTERRUPTIBLE : kinds;
}

static int opens(int (*real)(const char*, int, ...), const char* path, int flags, mode_t rights) {
  const int kinds = open_kinds(flags);
  const enum mode struck = kinds != 0 ? strike(kinds) : OFF;
  if (fails(struck)) return -1;
  const int result = real(path, played(flags), rights);
  mark(result, flags);
  finish(struck);
  return result;
}

int open(const char* path, int flags, ...) {
  va_list rest;
  va_start(rest, flags);
  const mode_t rights = va_arg(rest, mode_t);
  va_end(rest);
  return opens(REAL(open), path, flags, rights);
}

int open64(const char* path, int flags, ...) {
  va_list rest;
  va_start(rest, flags);
  const mode_t rights = va_arg(rest, mode_t);
  va_end(rest);
  return opens(REAL(open64), path, flags, rights);
}

int close(int file) {
  mark(file, 0);
  return REAL(close)(file);
}

int fcntl(int file, int command, ...) {
  va_list rest;
  va_start(rest, command);
  void* const argument = va_arg(rest, void*);
  va_end(rest);
  if (command == F_GETFL) {
    const int flags = REAL(fcntl)(file, command);
    return flags >= 0 && is_marked(file) ? flags | O_DIRECT : flags;
  }
  if (command != F_SETFL) return REAL(fcntl)(file, command, argument);
  const int flags = (int)(intptr_t)argument;
  const int turns_on = (flags & O_DIRECT) != 0 && direct_kind(file) == 0;
  const enum mode struck = turns_on ? strike(CHANGES | DIRECT) : OFF;
  if (fails(struck)) return -1;
  const int result = REAL(fcntl)(file, command, played(flags));
  if (result == 0) mark(file, flags);
  finish(struck);
  return result;
}
