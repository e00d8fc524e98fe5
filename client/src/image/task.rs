//! How administrative operations run: each is an `async fn` over object operations, which the compiler turns into a
//! state machine; nothing but the end of one of its operations, or a new map, moves it on.
//!
//! They are long sequences with loops and bounded parallelism, at the edge of the product and not on the path of an
//! I/O, where this form is shorter and easier to check than written-out states. No runtime, no waker, no thread: the
//! client polls a task when something that it waits for has come, so a simulator replays it exactly.

use crate::error::{ImageError, InvalidImage, IoError};
use crate::event::Progress;
use crate::objecter::{ObjectOp, OpOutcome};
use loligo_config::id::{ImageId, PoolId, SessionId};
use loligo_config::map::ClusterMap;
use loligo_reactor::dma::{BufferPool, SharedBuffer};
use loligo_reactor::env::Ticket;
use slab::Slab;
use std::cell::RefCell;
use std::collections::{BTreeMap, VecDeque};
use std::future::{Future, poll_fn};
use std::pin::Pin;
use std::rc::Rc;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};

/// Bits of an image id that count the images made in one session.
const ID_COUNTER_BITS: u32 = 20;

/// What tasks see of the client, and what they ask of it.
#[derive(Debug)]
struct Shared {
    pool: BufferPool,
    map: Option<Arc<ClusterMap>>,
    session: SessionId,
    unix_seconds: u64,
    /// Images made and trims begun.
    counter: u64,
    task: usize,
    last_call: u64,
    calls: VecDeque<Call>,
    results: BTreeMap<u64, Result<OpOutcome, IoError>>,
    progress: VecDeque<(Ticket, Progress)>,
    short_of_memory: bool,
}

/// An object operation that a task waits for.
#[derive(Debug)]
pub(crate) struct Call {
    pub(crate) task: usize,
    pub(crate) number: u64,
    pub(crate) op: ObjectOp,
}

/// A task's handle to the client.
#[derive(Clone, Debug)]
pub(crate) struct TaskContext(Rc<RefCell<Shared>>);

impl TaskContext {
    /// Runs one object operation.
    pub(crate) async fn op(&self, op: ObjectOp) -> Result<OpOutcome, IoError> {
        let number = {
            let mut shared = self.0.borrow_mut();
            shared.last_call += 1;
            let (task, number) = (shared.task, shared.last_call);
            shared.calls.push_back(Call { task, number, op });
            number
        };
        poll_fn(|_| match self.0.borrow_mut().results.remove(&number) {
            Some(result) => Poll::Ready(result),
            None => Poll::Pending,
        })
        .await
    }

    /// The pool with this name, once there is a map.
    ///
    /// # Errors
    /// When the map has none.
    pub(crate) async fn pool(&self, name: &str) -> Result<PoolId, ImageError> {
        let map = poll_fn(|_| match &self.0.borrow().map {
            Some(map) => Poll::Ready(Arc::clone(map)),
            None => Poll::Pending,
        })
        .await;
        let pool = map.pools.values().find(|pool| pool.name == name);
        pool.map(|pool| pool.id).ok_or_else(|| ImageError::NoPool { pool: name.to_owned() })
    }

    /// PGs of a pool that the map has had.
    ///
    /// # Errors
    /// When it is removed meanwhile.
    pub(crate) async fn pg_count(&self, pool: PoolId) -> Result<u32, ImageError> {
        let map = self.0.borrow().map.clone();
        let pool = map.as_ref().and_then(|map| map.pools.get(&pool));
        pool.map(|pool| pool.pg_count).ok_or(ImageError::Io(IoError::Fenced))
    }

    /// A buffer with a copy of the bytes, once there is room.
    pub(crate) async fn buffer(&self, bytes: &[u8]) -> SharedBuffer {
        poll_fn(|_| {
            let mut shared = self.0.borrow_mut();
            match shared.pool.copy_of(bytes) {
                Ok(buffer) => Poll::Ready(buffer),
                Err(_) => {
                    shared.short_of_memory = true;
                    Poll::Pending
                }
            }
        })
        .await
    }

    /// Seconds since 1970, for people to read.
    pub(crate) fn unix_seconds(&self) -> u64 {
        self.0.borrow().unix_seconds
    }

    pub(crate) fn session(&self) -> SessionId {
        self.0.borrow().session
    }

    /// A number that this client has not used before.
    pub(crate) fn next_number(&self) -> u64 {
        let mut shared = self.0.borrow_mut();
        shared.counter += 1;
        shared.counter
    }

    /// An id for a new image. Sessions are never used twice in a cluster, so the id is made of the session and a
    /// count, and cannot meet another one as a random number could.
    ///
    /// # Errors
    /// After a million images of one client.
    pub(crate) fn new_image_id(&self) -> Result<ImageId, InvalidImage> {
        let count = self.next_number();
        let session = self.session().0;
        if count >> ID_COUNTER_BITS != 0 || session >> (64 - ID_COUNTER_BITS) != 0 {
            return Err(InvalidImage::TooManyCreated);
        }
        Ok(ImageId(session << ID_COUNTER_BITS | count))
    }

    pub(crate) fn report(&self, ticket: Ticket, done: u64, total: u64) {
        self.0.borrow_mut().progress.push_back((ticket, Progress { done, total }));
    }
}

type Running<T> = Pin<Box<dyn Future<Output = T>>>;

/// The tasks of one client.
pub(crate) struct Tasks<T> {
    shared: Rc<RefCell<Shared>>,
    tasks: Slab<Running<T>>,
    ready: VecDeque<usize>,
}

impl<T> std::fmt::Debug for Tasks<T> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Tasks").field("count", &self.tasks.len()).finish_non_exhaustive()
    }
}

impl<T> Tasks<T> {
    pub(crate) fn new(pool: BufferPool) -> Self {
        let shared = Shared {
            pool,
            map: None,
            session: SessionId(0),
            unix_seconds: 0,
            counter: 0,
            task: 0,
            last_call: 0,
            calls: VecDeque::new(),
            results: BTreeMap::new(),
            progress: VecDeque::new(),
            short_of_memory: false,
        };
        Self { shared: Rc::new(RefCell::new(shared)), tasks: Slab::new(), ready: VecDeque::new() }
    }

    /// Starts a task; it runs at the next `run`.
    pub(crate) fn start<F: Future<Output = T> + 'static>(&mut self, make: impl FnOnce(TaskContext) -> F) {
        let task = self.tasks.insert(Box::pin(make(TaskContext(Rc::clone(&self.shared)))));
        self.ready.push_back(task);
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.tasks.is_empty()
    }

    /// What tasks see from now on. A new map lets those go on that wait for one.
    pub(crate) fn see(&mut self, map: Option<&Arc<ClusterMap>>, session: SessionId, unix_seconds: u64) {
        let mut shared = self.shared.borrow_mut();
        shared.session = session;
        shared.unix_seconds = unix_seconds;
        let is_new = map.map(|map| map.epoch) != shared.map.as_ref().map(|map| map.epoch);
        if is_new {
            shared.map = map.cloned();
        }
        if is_new || std::mem::take(&mut shared.short_of_memory) {
            self.ready.extend(self.tasks.iter().map(|(task, _)| task));
        }
    }

    /// An operation of a task has ended.
    pub(crate) fn call_done(&mut self, task: usize, number: u64, result: Result<OpOutcome, IoError>) {
        self.shared.borrow_mut().results.insert(number, result);
        self.ready.push_back(task);
    }

    /// Runs the tasks that can go on; those that end are put into `ended`. Returns whether any ran.
    pub(crate) fn run(&mut self, ended: &mut Vec<T>) -> bool {
        let ran = !self.ready.is_empty();
        while let Some(task) = self.ready.pop_front() {
            let Some(running) = self.tasks.get_mut(task) else { continue };
            self.shared.borrow_mut().task = task;
            if let Poll::Ready(output) = running.as_mut().poll(&mut Context::from_waker(Waker::noop())) {
                drop(self.tasks.remove(task));
                ended.push(output);
            }
        }
        ran
    }

    pub(crate) fn next_call(&mut self) -> Option<Call> {
        self.shared.borrow_mut().calls.pop_front()
    }

    pub(crate) fn next_progress(&mut self) -> Option<(Ticket, Progress)> {
        self.shared.borrow_mut().progress.pop_front()
    }
}

/// Runs `make(i)` for every `i` of the range, at most `limit` at once, and calls `each` with what every one returned.
pub(crate) async fn for_each<F>(
    range: std::ops::Range<u64>,
    limit: usize,
    mut make: impl FnMut(u64) -> F,
    mut each: impl FnMut(F::Output),
) where
    F: Future,
{
    let mut next = range.start;
    let mut running: Vec<Pin<Box<F>>> = Vec::with_capacity(limit);
    poll_fn(move |context| {
        loop {
            let mut at = 0;
            let mut ended = false;
            while at < running.len() {
                if let Poll::Ready(output) = running[at].as_mut().poll(context) {
                    drop(running.swap_remove(at));
                    each(output);
                    ended = true;
                } else {
                    at += 1;
                }
            }
            let mut began = false;
            while running.len() < limit && next < range.end {
                running.push(Box::pin(make(next)));
                next += 1;
                began = true;
            }
            if running.is_empty() && next >= range.end {
                return Poll::Ready(());
            }
            if !began && !ended {
                return Poll::Pending;
            }
        }
    })
    .await;
}
