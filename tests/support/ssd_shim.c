/* Stands between a process and libc's pwritev, preadv and fdatasync. Call number SHIM_AT of them, from 0, does not happen,
 * but what SHIM_DO says: "kill" ends the process, "torn" after half of a write; "short" does half; a number is an errno.
 * SHIM_FROM=1: that call and all later ones. SHIM_LOG, if set, is a file that gets a byte a call.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

static int calls; /* of all threads */

static const char *order(void) {
    static int at = -2, from, log = -1;
    if (at == -2) {
        const char *text = getenv("SHIM_AT"), *file = getenv("SHIM_LOG");
        from = getenv("SHIM_FROM") != NULL;
        if (file != NULL) log = open(file, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
        at = text == NULL ? -1 : atoi(text);
    }
    int number = __atomic_fetch_add(&calls, 1, __ATOMIC_SEQ_CST);
    if (log >= 0 && write(log, ".", 1) != 1) abort();
    return at >= 0 && (number == at || (from && number > at)) ? getenv("SHIM_DO") : NULL;
}

static long move(long kind, int fd, const struct iovec *vectors, int count, off_t offset) {
    const char *what = order();
    if (what == NULL) return syscall(kind, fd, vectors, count, (long)offset, 0L);
    if (strcmp(what, "kill") == 0) kill(getpid(), SIGKILL);
    if (atoi(what) > 0) {
        errno = atoi(what);
        return -1;
    }
    struct iovec half = {vectors->iov_base, vectors->iov_len >= 8192 ? vectors->iov_len / 8192 * 4096 : vectors->iov_len};
    long done = syscall(kind, fd, count > 1 && half.iov_len < 8192 ? vectors : &half,
                        count > 1 && half.iov_len < 8192 ? (count + 1) / 2 : 1, (long)offset, 0L);
    if (strcmp(what, "torn") == 0) kill(getpid(), SIGKILL);
    return done;
}

ssize_t pwritev(int fd, const struct iovec *vectors, int count, off_t offset) {
    return move(SYS_pwritev, fd, vectors, count, offset);
}
ssize_t pwritev64(int fd, const struct iovec *vectors, int count, off_t offset) {
    return move(SYS_pwritev, fd, vectors, count, offset);
}
ssize_t preadv(int fd, const struct iovec *vectors, int count, off_t offset) {
    return move(SYS_preadv, fd, vectors, count, offset);
}
ssize_t preadv64(int fd, const struct iovec *vectors, int count, off_t offset) {
    return move(SYS_preadv, fd, vectors, count, offset);
}
int fdatasync(int fd) {
    const char *what = order();
    if (what == NULL || strcmp(what, "short") == 0) return (int)syscall(SYS_fdatasync, fd);
    if (atoi(what) == 0) kill(getpid(), SIGKILL);
    errno = atoi(what);
    return -1;
}
ssize_t pwritev2(int fd, const struct iovec *vectors, int count, off_t offset, int flags) {
    return flags ? abort(), -1 : move(SYS_pwritev, fd, vectors, count, offset);
}
ssize_t pwritev64v2(int fd, const struct iovec *vectors, int count, off_t offset, int flags) {
    return flags ? abort(), -1 : move(SYS_pwritev, fd, vectors, count, offset);
}
ssize_t preadv2(int fd, const struct iovec *vectors, int count, off_t offset, int flags) {
    return flags ? abort(), -1 : move(SYS_preadv, fd, vectors, count, offset);
}
ssize_t preadv64v2(int fd, const struct iovec *vectors, int count, off_t offset, int flags) {
    return flags ? abort(), -1 : move(SYS_preadv, fd, vectors, count, offset);
}
