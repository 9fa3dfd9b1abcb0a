/* A loop of independent tasks on as many threads as torch was told to take. Included by kernels.c only.
 *
 * OpenMP's threads sleep between loops, since other processes want their cores, and each must come to the end of every
 * loop: a decode step has a hundred loops of some 100 us, and waits in each for a thread to wake, or for another process
 * to leave its core. Here a thread that comes late finds nothing left to do, and nobody waits for it: whoever is there
 * takes the next tasks. Helpers look out for the next loop for a short while, then they sleep.
 *
 * One loop at a time; a second one, or one within a task, runs where it is called. */
#include <omp.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <time.h>

typedef void (*task_of)(const void *context, int64_t task);

enum { MOST_THREADS = 256 };
static const int64_t AWAKE_NS = 100000;
static const uint64_t CLOSED = 0xffffffffu;

/* `next`: the loop's number in the upper half, the next task in the lower one, or CLOSED while the others change. Who
 * takes a task compares both, and so has read these of that very loop. */
static struct {
    pthread_mutex_t owned, sleep;
    pthread_cond_t woken;
    _Atomic(uint64_t) next;
    _Atomic(task_of) body;
    _Atomic(const void *) context;
    _Atomic(int64_t) tasks, done, helpers;
    _Atomic(uint32_t) loops;
    _Atomic(int) asleep;
    int64_t started; /* helpers; changed by who owns the pool */
} pool = {.owned = PTHREAD_MUTEX_INITIALIZER, .sleep = PTHREAD_MUTEX_INITIALIZER, .woken = PTHREAD_COND_INITIALIZER};

INLINE int64_t now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

/* Takes tasks of the loop under way until none is left. */
static void take_tasks(void) {
    for (;;) {
        uint64_t next = atomic_load(&pool.next), task = next & CLOSED;
        task_of body = atomic_load(&pool.body);
        const void *context = atomic_load(&pool.context);
        if ((int64_t)task >= atomic_load(&pool.tasks) || task == CLOSED) return;
        if (!atomic_compare_exchange_weak(&pool.next, &next, next + 1)) continue;
        body(context, (int64_t)task);
        atomic_fetch_add(&pool.done, 1);
    }
}

/* Until there is another loop than the one `seen`. It looks without a pause: in a virtual machine, many of those take
 * the core away for longer than the loop lasts. */
static void await_loop(uint32_t seen) {
    for (int64_t until = now_ns() + AWAKE_NS; now_ns() < until;)
        for (int i = 0; i < 100; i++)
            if (atomic_load(&pool.loops) != seen) return;
    pthread_mutex_lock(&pool.sleep);
    atomic_fetch_add(&pool.asleep, 1);
    while (atomic_load(&pool.loops) == seen) pthread_cond_wait(&pool.woken, &pool.sleep);
    atomic_fetch_sub(&pool.asleep, 1);
    pthread_mutex_unlock(&pool.sleep);
}

static void *help(void *rank) {
    for (uint32_t seen = 0;; seen = atomic_load(&pool.loops)) {
        if ((int64_t)(intptr_t)rank < atomic_load(&pool.helpers)) take_tasks();
        await_loop(seen);
    }
    return NULL;
}

/* Helpers take no signals: those are for the interpreter's own thread. */
static void start_helpers(int64_t count) {
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    for (pthread_t thread; pool.started < count; pool.started++) {
        if (pthread_create(&thread, NULL, help, (void *)(intptr_t)pool.started)) break;
        pthread_detach(thread);
    }
    pthread_sigmask(SIG_SETMASK, &before, NULL);
}

/* body(context, task) for every task, in any order, and all are done afterwards. */
static void each_task(int64_t tasks, task_of body, const void *context) {
    int64_t helpers = omp_get_max_threads() - 1;
    if (helpers > MOST_THREADS) helpers = MOST_THREADS;
    if (tasks < 2 || helpers < 1 || omp_in_parallel() || pthread_mutex_trylock(&pool.owned)) {
        for (int64_t task = 0; task < tasks; task++) body(context, task);
        return;
    }
    if (pool.started < helpers) start_helpers(helpers);
    uint64_t number = (atomic_load(&pool.next) >> 32) + 1;
    atomic_store(&pool.next, number << 32 | CLOSED);
    atomic_store(&pool.body, body);
    atomic_store(&pool.context, context);
    atomic_store(&pool.tasks, tasks);
    atomic_store(&pool.helpers, helpers);
    atomic_store(&pool.done, 0);
    atomic_store(&pool.next, number << 32);
    atomic_fetch_add(&pool.loops, 1);
    if (atomic_load(&pool.asleep)) {
        pthread_mutex_lock(&pool.sleep);
        pthread_cond_broadcast(&pool.woken);
        pthread_mutex_unlock(&pool.sleep);
    }
    take_tasks();
    for (int i = 0; atomic_load(&pool.done) < tasks; i++)
        if (i > 1000) sched_yield(); /* its core may be another process's now */
    pthread_mutex_unlock(&pool.owned);
}

/* `count` things in ranges, several for each thread, so that one that is held up keeps few. */
INLINE int64_t range_size(int64_t count) {
    int64_t threads = omp_get_max_threads(), size = count / (8 * threads);
    return threads < 2 ? count + !count : size + !size;
}
