/* check.h - what a C test needs: checks that count instead of ending, a runner, a deadline for the process.
 *
 *     #include "check.h"
 *     static void test_adds(void) { CHECK(1 + 1 == 2); }
 *     int main(void) { RUN(test_adds); return check_report(); }
 *
 * A failing check prints where and what, and the test goes on; CHECK_OR_RETURN leaves the function instead,
 * for checks without which the rest makes no sense. Checks may be used from several threads. A child made by
 * fork() starts with its parent's counts and its own deadline; it ends with _exit(check_report()). After
 * CHECK_DEADLINE_S seconds (default 100; the variable CHECK_DEADLINE of the runner goes first) a process names
 * the test that it was in and exits with 124, so that no test can hang.
 */
#ifndef ZX_TESTS_CHECK_H
#define ZX_TESTS_CHECK_H

#include <math.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/zx.h"

#ifndef CHECK_DEADLINE_S
#define CHECK_DEADLINE_S 100
#endif

static atomic_llong check_n_done_;
static atomic_llong check_n_failed_;

static const char *volatile check_current_ = "main";

static void check_expired_(int signal_number)
{
    const char *parts[] = {"FAILED ", check_current_, ": the deadline of the test process passed\n"};
    (void)signal_number;
    for (int i = 0; i < 3; i++) {
        if (write(STDOUT_FILENO, parts[i], strlen(parts[i])) < 0) {
            break;
        }
    }
    _exit(124);
}

static void check_set_alarm_(void)
{
    const char *runner = getenv("CHECK_DEADLINE");
    alarm(runner ? (unsigned)atoi(runner) : CHECK_DEADLINE_S);
}

/* An alarm does not survive fork(): a child sets one of its own. */
__attribute__((constructor, used)) static void check_start_(void)
{
    setvbuf(stdout, NULL, _IOLBF, 0);
    signal(SIGALRM, check_expired_);
    pthread_atfork(NULL, NULL, check_set_alarm_);
    check_set_alarm_();
}

/* Counts one check; prints the place when it failed, so that the caller only adds the values. Returns ok. */
__attribute__((unused)) static bool check_(bool ok, const char *file, int line, const char *what)
{
    atomic_fetch_add(&check_n_done_, 1);
    if (!ok) {
        atomic_fetch_add(&check_n_failed_, 1);
        printf("%s:%d: FAILED: %s\n", file, line, what);
    }
    return ok;
}

__attribute__((unused)) static bool check_i64_(int64_t got, int64_t want, const char *file, int line, const char *what)
{
    if (!check_(got == want, file, line, what)) {
        printf("    got %lld, want %lld\n", (long long)got, (long long)want);
    }
    return got == want;
}

/* |got - want| <= rtol * max(|got|, |want|); two equal infinities are near, a NaN is near nothing. */
__attribute__((unused)) static bool check_near_(double got, double want, double rtol, const char *file, int line,
                                                const char *what)
{
    double larger = fmax(fabs(got), fabs(want));
    bool ok = got == want || (isfinite(got) && isfinite(want) && fabs(got - want) <= rtol * larger);
    if (!check_(ok, file, line, what)) {
        printf("    got %.17g, want %.17g, relative error %.3g, allowed %.3g\n", got, want, fabs(got - want) / larger,
               rtol);
    }
    return ok;
}

/* The calling thread's error record, frame by frame; clears it. */
__attribute__((unused)) static void check_print_error_(void)
{
    const zx_error *e = zx_error_last();
    printf("    %s (native %d): %s\n", zx_status_name(e->status), e->native, e->text);
    for (int i = 0; i < e->n_frames; i++) {
        const zx_frame *f = &e->frames[i];
        printf("      [%s] in %s (%s:%d)\n", f->expr ? f->expr : "", f->func, f->file, f->line);
    }
    zx_error_clear();
}

__attribute__((unused)) static bool check_status_(zx_status got, zx_status want, const char *file, int line,
                                                  const char *what)
{
    if (!check_(got == want, file, line, what)) {
        printf("    got status %s, want %s\n", zx_status_name(got), zx_status_name(want));
        if (got != ZX_OK) {
            check_print_error_();
        }
    }
    return got == want;
}

__attribute__((unused)) static bool check_text_(const char *part, const char *file, int line)
{
    const char *text = zx_error_last()->text;
    bool ok = strstr(text, part) != NULL;
    if (!check_(ok, file, line, "the error text has the part")) {
        printf("    text \"%s\", part \"%s\"\n", text, part);
    }
    return ok;
}

#define CHECK(cond) check_((cond), __FILE__, __LINE__, #cond)
#define CHECK_EQ_I64(got, want) check_i64_((int64_t)(got), (int64_t)(want), __FILE__, __LINE__, #got " == " #want)
#define CHECK_NEAR(got, want, rtol)                                                                                    \
    check_near_((double)(got), (double)(want), (rtol), __FILE__, __LINE__, #got " near " #want)
/* The call succeeds; otherwise the error record is printed and cleared. */
#define CHECK_OK(call) check_status_((call), ZX_OK, __FILE__, __LINE__, #call)
/* The call fails with exactly this status; the record stays for CHECK_ERROR_HAS. */
#define CHECK_STATUS(call, status) check_status_((call), (status), __FILE__, __LINE__, #call " -> " #status)
/* The text of the last error contains the part: errors must hold the values that matter. */
#define CHECK_ERROR_HAS(part) check_text_((part), __FILE__, __LINE__)
#define CHECK_OR_RETURN(check, ...)                                                                                    \
    do {                                                                                                               \
        if (!(check)) {                                                                                                \
            return __VA_ARGS__;                                                                                        \
        }                                                                                                              \
    } while (0)

/* Runs one test function and prints "ok name" or "FAILED name". */
#define RUN(test)                                                                                                      \
    do {                                                                                                               \
        long long failed_ = atomic_load(&check_n_failed_);                                                             \
        zx_error_clear();                                                                                              \
        check_current_ = #test;                                                                                        \
        test();                                                                                                        \
        printf("%s %s\n", atomic_load(&check_n_failed_) == failed_ ? "ok" : "FAILED", #test);                          \
    } while (0)

/* Prints the totals and returns the exit code. A test without a single check fails. */
__attribute__((unused)) static int check_report(void)
{
    long long n_done = atomic_load(&check_n_done_), n_failed = atomic_load(&check_n_failed_);
    printf("%lld checks, %lld failed\n", n_done, n_failed);
    return n_done == 0 || n_failed != 0;
}

#endif
