/* threads.c - parallel-for over threads that live for one call: the work here is coarse (a channel's fit, a layer's
 * attention), so that starting threads costs nothing beside it. */
#include "calib/threads.h"

#include <pthread.h>
#include <stdatomic.h>

struct job {
    atomic_int next;
    int n;
    void (*body)(void *arg, int i);
    void *arg;
};

static void *work(void *of)
{
    struct job *job = of;
    for (int i; (i = atomic_fetch_add(&job->next, 1)) < job->n;) job->body(job->arg, i);
    return NULL;
}

void lowkey_threads_run(void *user, int n, void (*body)(void *arg, int i), void *arg)
{
    enum { MAX_THREADS = 256 };
    pthread_t threads[MAX_THREADS];
    const int wanted = *(const int *)user;
    struct job job = { .n = n, .body = body, .arg = arg };
    int n_started = 0;
    while (n_started < MAX_THREADS && n_started + 1 < wanted && n_started + 1 < n &&
           pthread_create(&threads[n_started], NULL, work, &job) == 0)
        n_started++;
    work(&job);
    for (int i = 0; i < n_started; i++) pthread_join(threads[i], NULL);
}
