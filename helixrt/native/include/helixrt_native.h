/* The C ABI of helixrt's data plane.
 *
 * An engine carries the bytes of one group of ranks: one generation after another, each with its own links. It owns one thread.
 * A caller that waits drives the engine itself; the thread does so otherwise, and beats to the peers.
 *
 * Unless a function says otherwise: any thread may call it; it does not block for longer than a turn of the engine (a few hundred
 * microseconds); it returns a negative errno when it fails. Memory that is given to an operation or a message belongs to the
 * engine until its event. All times are in nanoseconds. Nothing here throws, calls back, or touches the interpreter.
 *
 * After a fork the child owns nothing: every function returns -ECHILD there, but hx_free, which closes its copies of the sockets.
 */
#ifndef HELIXRT_NATIVE_H
#define HELIXRT_NATIVE_H
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define HX_ABI 1 /* raised by every change of this header */

typedef struct hx_engine hx_engine;

int32_t hx_abi(void);          /* HX_ABI of the library; the caller compares it with the one it knows */
int32_t hx_protocol(void);     /* of the frames; peers compare theirs in the handshake */
const char *hx_build(void);    /* compiler, instruction set; for people */

/* ---- settings: io.hpp, Options, in the same order. 0 keeps the default, for `period` -1 means none. */
typedef struct {
  int64_t period, connect, answer, attempt, retry, rest, longest_rest, steady, acknowledge;
  int64_t eager_bytes, keep_bytes, eager_memory, rail_bytes, window_bytes, turn_bytes, concurrent;
} hx_options;

hx_engine *hx_new(const hx_options *options); /* NULL: no descriptors or threads left */
void hx_free(hx_engine *engine);              /* aborts what runs, ends the thread, closes all connections; NULL is fine */

/* ---- generations */
/* Begin a generation as rank `me` of `size`; rails[r] is the number of rails to rank r, 0 where there is no link. Ends what an
 * earlier generation left, as an abort does. */
int32_t hx_begin(hx_engine *engine, uint32_t generation, int32_t me, int32_t size, const int32_t *rails);

/* A connected, authenticated stream socket is rail `rail` to `peer`, in its connection number `number` (from 1, the same at both
 * ends). The engine owns `fd` from now on, also when this fails. */
int32_t hx_rail_up(hx_engine *engine, int32_t peer, int32_t rail, uint32_t number, int32_t fd);
/* The same over shared memory: `memory` is a descriptor of at least hx_ring_bytes() bytes that both ends map, zeroed before;
 * `fd` a socket pair that wakes the other end and shows its end; `first`: 1 at exactly one of the two ends. */
int32_t hx_rail_up_memory(hx_engine *engine, int32_t peer, int32_t rail, uint32_t number, int32_t fd, int32_t memory, int32_t first);
int64_t hx_ring_bytes(void);
/* It could not be connected, or is known to be broken. `failure`: types.hpp, Failure. */
int32_t hx_rail_down(hx_engine *engine, int32_t peer, int32_t rail, int32_t failure, const char *reason);
int32_t hx_rail_slow(hx_engine *engine, int32_t peer, int32_t rail);
int32_t hx_lose(hx_engine *engine, int32_t peer, const char *reason);

/* End the generation, at once. The first cause counts and stays readable in the event. */
int32_t hx_abort(hx_engine *engine, const char *cause);
/* The same from a signal handler. */
void hx_abort_signal(hx_engine *engine);
/* End it in order: peers learn that nothing else comes. Waits at most `linger` until the last bytes are written. */
int32_t hx_finish(hx_engine *engine, int64_t linger);

/* ---- operations */
/* A plan in the flat form of plan.hpp, for the `size` ranks of the generation. Returns its number, from 0; -EINVAL for no plan, and
 * then `why` (of `why_bytes`) says what is wrong. Plans last as long as the engine, or until hx_plan_free. */
int64_t hx_plan(hx_engine *engine, int32_t size, const int64_t *flat, int64_t count, const int64_t *after, const int64_t *after_begin,
                int64_t scratch_bytes, char *why, int64_t why_bytes);
int32_t hx_plan_free(hx_engine *engine, int64_t plan); /* -EBUSY while an operation uses it */

typedef struct {
  int64_t plan;
  void *source, *out; /* the same for a call in place */
  int64_t source_bytes, out_bytes;
  int32_t dtype, op; /* reduce.hpp */
  int64_t divisor;
  int64_t timeout; /* until the operation must have ended; 0: none. An operation that has not ends the generation */
  int64_t fingerprint, name;
  uint32_t first;
  uint32_t waits; /* 1: hx_wait follows at once, in this thread; its end is not announced */
  uint32_t external; /* 1: reductions, copies and the leave to send the source are the caller's (events NODE and ARRIVED) */
  uint32_t unused;
} hx_call;

int64_t hx_submit(hx_engine *engine, const hx_call *call); /* the operation's number; -EINVAL for memory that is too short */
/* Until the operation ended: types.hpp, Status. 0 after `timeout` (below 0: none), or when a signal came: call again. Drives the
 * engine. */
int32_t hx_wait(hx_engine *engine, int64_t operation, int64_t timeout);
int32_t hx_status(hx_engine *engine, int64_t operation); /* Status, without waiting */

/* Node `node` of an operation with `external` work is carried out; nothing if the operation is over. */
int32_t hx_node_done(hx_engine *engine, int64_t operation, int32_t node);

/* ---- single messages: each ends with an event, SENT or RECEIVED, unless the generation ends first */
int32_t hx_send(hx_engine *engine, int32_t peer, int64_t op, uint32_t index, const void *data, int64_t bytes);
int32_t hx_receive(hx_engine *engine, int32_t peer, int64_t op, uint32_t index, void *into, int64_t bytes);

/* ---- events: io.hpp, Event; DONE is not among them unless `announce` was set */
typedef struct {
  int32_t event, peer;
  int64_t op, a, b;
  int64_t at;        /* when it came about, monotonic */
  char text[1024];
} hx_event;
int32_t hx_events(hx_engine *engine, hx_event *into, int32_t most); /* how many were written, oldest first */
int32_t hx_event_fd(hx_engine *engine);                             /* readable while there are events */
int32_t hx_ended(hx_engine *engine, hx_event *into);                /* 1 and the event if the generation is over, else 0 */
int32_t hx_announce(hx_engine *engine, int32_t yes);                /* DONE comes as an event, too, but where the call said `waits` */

/* ---- figures, since the engine was made */
typedef struct {
  int64_t bytes_sent, bytes_received, frames_sent, frames_received, fragments_again, duplicates, failures, returns;
} hx_rail_counters;
int32_t hx_counters(hx_engine *engine, int32_t peer, int32_t rail, hx_rail_counters *into);
typedef struct {
  int64_t turns, caller_turns, sleeps, kicks, system_calls, spins_ns, driven_ns; /* of the loop */
} hx_loop_counters;
int32_t hx_loop(hx_engine *engine, hx_loop_counters *into);
/* The state as text, at most `bytes`; for a run that hangs. */
int64_t hx_print(hx_engine *engine, char *into, int64_t bytes);

/* ---- arithmetic, as operations do it; for tests. -EINVAL where torch has no such reduction. */
int32_t hx_reduce(int32_t dtype, int32_t op, int64_t divisor, void *into, const void *left, const void *right, int64_t count);
int32_t hx_element_bytes(int32_t dtype);

#ifdef __cplusplus
}
#endif
#endif
