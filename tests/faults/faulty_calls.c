// Preloaded into a process: its nth call that changes a file system fails, is cut short, or kills
// the process.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

enum mode { OFF, COUNT, KILL_BEFORE, KILL_AFTER, FAIL_EIO, FAIL_ENOSPC, SHORT };

static atomic_long calls;
static atomic_long target;
static atomic_int mode;

void faults_arm(int new_mode, long at) {
  calls = 0;
  target = at;
  mode = new_mode;
}

long faults_disarm(void) {
  mode = OFF;
  return calls;
}

// Whether this call is the one; those that fail set errno.
static int strikes(void) {
  if (mode == OFF) return 0;
  if (atomic_fetch_add(&calls, 1) != target) return 0;
  if (mode == KILL_BEFORE) kill(getpid(), SIGKILL);
  errno = mode == FAIL_EIO ? EIO : ENOSPC;
  return mode != COUNT;
}

static int fails(int struck) { return struck && (mode == FAIL_EIO || mode == FAIL_ENOSPC); }

static void finish(int struck) {
  if (struck && mode == KILL_AFTER) kill(getpid(), SIGKILL);
}

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

#define CALL(name, ...)                                                       \
  const int struck = strikes();                                               \
  if (fails(struck)) return -1;                                               \
  const __typeof__(REAL(name)(__VA_ARGS__)) result = REAL(name)(__VA_ARGS__); \
  finish(struck);                                                             \
  return result

int fsync(int file) { CALL(fsync, file); }
int fdatasync(int file) { CALL(fdatasync, file); }
int rename(const char* from, const char* to) { CALL(rename, from, to); }
int mkdir(const char* path, mode_t rights) { CALL(mkdir, path, rights); }
int unlink(const char* path) { CALL(unlink, path); }
int unlinkat(int folder, const char* path, int flags) { CALL(unlinkat, folder, path, flags); }
int rmdir(const char* path) { CALL(rmdir, path); }

ssize_t write(int file, const void* bytes, size_t size) {
  const int struck = strikes();
  if (fails(struck)) return -1;
  // What is cut short here fails next, as on a disk that fills up.
  if (struck && mode == SHORT) {
    target = calls;
    const ssize_t done = size > 1 ? REAL(write)(file, bytes, size / 2) : 0;
    mode = FAIL_ENOSPC;
    return done;
  }
  const ssize_t result = REAL(write)(file, bytes, size);
  finish(struck);
  return result;
}

ssize_t writev(int file, const struct iovec* parts, int count) {
  const int struck = strikes();
  if (fails(struck)) return -1;
  if (struck && mode == SHORT) {
    target = calls;
    const size_t size = parts[0].iov_len;
    const ssize_t done = size > 1 ? REAL(write)(file, parts[0].iov_base, size / 2) : 0;
    mode = FAIL_ENOSPC;
    return done;
  }
  const ssize_t result = REAL(writev)(file, parts, count);
  finish(struck);
  return result;
}

static int opens(int (*real)(const char*, int, ...), const char* path, int flags, mode_t rights) {
  const int struck = (flags & O_CREAT) != 0 && strikes();
  if (fails(struck)) return -1;
  const int result = real(path, flags, rights);
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
