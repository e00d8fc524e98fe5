//! Socket operations on the reactor's ring, with a safe face: the only unsafe code of this crate.
//!
//! Every operation has a slot that owns what the kernel was told of (the buffer, the pieces, the address, the
//! descriptor) until its last completion was taken. Nothing leaves a slot earlier, not when its connection is closed
//! and not when the transport is dropped: dropping cancels, waits, and only then frees.
#![allow(unsafe_code)]

use io_uring::squeue::Entry;
use io_uring::{cqueue, opcode, types};
use loligo_reactor::dma::{Buffer, SharedBuffer};
use loligo_reactor::os::ring::{Ring, RingCompletion, RingOwner};
use slab::Slab;
use std::collections::VecDeque;
use std::io;
use std::net::SocketAddr;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::rc::Rc;
use std::time::Duration;

/// Pieces of one send. Eight frames with data in one system call; more were not faster over loopback, where copying
/// dominates.
pub(super) const BATCH_PIECES_MAX: usize = 32;
/// `IORING_RECVSEND_POLL_FIRST` of `io_uring.h`, which the io-uring crate does not export.
const POLL_FIRST: u16 = 1;

/// What one slot's operation is for: the user's own value comes back with the completion.
pub(super) type Tag = u64;

/// Names an operation in flight.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct OpKey(usize);

/// Socket operations of one transport.
pub(super) struct SocketRing {
    owner: RingOwner,
    slots: Slab<Slot>,
    /// Raw as in [`Op::Send`], so that one pointer is all that ever reaches a batch.
    spare: Vec<*mut Batch>,
    /// Failed at once for want of room in the ring; reported like completions.
    refused: VecDeque<(Tag, Done)>,
    nudged: bool,
}

struct Slot {
    tag: Tag,
    op: Op,
    /// Kept open while the kernel may use its number.
    _fd: Option<Rc<OwnedFd>>,
}

enum Op {
    Accept,
    /// The kernel reads these two when it takes the entry, or later.
    Connect {
        _address: Box<Address>,
    },
    Receive {
        buffer: Buffer,
        from: usize,
    },
    Send {
        batch: *mut Batch,
        enters: u64,
    },
    Timer {
        _time: Box<types::Timespec>,
    },
    Nudge,
}

/// The end, or one result, of an operation.
pub(super) enum Done {
    /// A connection, or why there is none; `armed`: more may follow from the same operation.
    Accepted { result: Result<OwnedFd, i32>, armed: bool },
    /// The result of a connect.
    Connected(Result<(), i32>),
    /// The buffer comes back; on success bytes from `from` on are new. `more`: the socket held more than fitted.
    Received { buffer: Buffer, from: usize, result: Result<usize, i32>, more: bool },
    /// The result of a send; `left` is what was not sent.
    Sent { left: VecDeque<SharedBuffer>, result: Result<usize, i32> },
    /// A timer has fired, or was cancelled.
    Elapsed,
    /// See [`SocketRing::nudge`].
    Nudged,
}

/// A message with its vector and the buffers that it points into.
struct Batch {
    header: libc::msghdr,
    vector: [libc::iovec; BATCH_PIECES_MAX],
    pieces: VecDeque<SharedBuffer>,
}

impl Batch {
    fn new() -> Box<Self> {
        let empty = libc::iovec { iov_base: std::ptr::null_mut(), iov_len: 0 };
        // SAFETY: `msghdr` is plain integers and pointers, for all of which zero is a value.
        let header = unsafe { std::mem::zeroed() };
        Box::new(Self {
            header,
            vector: [empty; BATCH_PIECES_MAX],
            pieces: VecDeque::with_capacity(BATCH_PIECES_MAX),
        })
    }

    fn push(&mut self, piece: SharedBuffer) {
        let at = self.pieces.len();
        // The kernel only reads through this pointer: it is a send.
        let base = piece.as_ptr().cast_mut().cast();
        self.vector[at] = libc::iovec { iov_base: base, iov_len: piece.len() };
        self.pieces.push_back(piece);
        self.header.msg_iovlen = at + 1;
    }

    /// Takes off what was sent, and returns the rest.
    fn take_unsent(&mut self, mut sent: usize) -> VecDeque<SharedBuffer> {
        while let Some(first) = self.pieces.front_mut() {
            if sent < first.len() {
                *first = first.slice(sent..first.len());
                break;
            }
            sent -= first.len();
            self.pieces.pop_front();
        }
        // Mostly all was sent: then the batch keeps its allocation for the next one.
        if self.pieces.is_empty() { VecDeque::new() } else { std::mem::take(&mut self.pieces) }
    }
}

/// A socket address as the kernel reads it.
struct Address {
    storage: libc::sockaddr_storage,
    len: libc::socklen_t,
}

impl Address {
    fn new(address: SocketAddr) -> Box<Self> {
        // SAFETY: `sockaddr_storage` is plain integers, for all of which zero is a value.
        let mut storage: libc::sockaddr_storage = unsafe { std::mem::zeroed() };
        let start = &raw mut storage;
        let len = match address {
            SocketAddr::V4(v4) => {
                let inner = libc::sockaddr_in {
                    sin_family: libc::AF_INET as libc::sa_family_t,
                    sin_port: v4.port().to_be(),
                    sin_addr: libc::in_addr { s_addr: u32::from_ne_bytes(v4.ip().octets()) },
                    sin_zero: [0; 8],
                };
                // SAFETY: a `sockaddr_storage` is at least as large and as aligned as every address type.
                unsafe { start.cast::<libc::sockaddr_in>().write(inner) };
                size_of::<libc::sockaddr_in>()
            }
            SocketAddr::V6(v6) => {
                let inner = libc::sockaddr_in6 {
                    sin6_family: libc::AF_INET6 as libc::sa_family_t,
                    sin6_port: v6.port().to_be(),
                    sin6_flowinfo: v6.flowinfo(),
                    sin6_addr: libc::in6_addr { s6_addr: v6.ip().octets() },
                    sin6_scope_id: v6.scope_id(),
                };
                // SAFETY: as for IPv4.
                unsafe { start.cast::<libc::sockaddr_in6>().write(inner) };
                size_of::<libc::sockaddr_in6>()
            }
        };
        Box::new(Self { storage, len: libc::socklen_t::try_from(len).expect("an address is short") })
    }
}

/// A new TCP socket for an address of this family.
pub(super) fn tcp_socket(address: SocketAddr) -> io::Result<OwnedFd> {
    let family = if address.is_ipv4() { libc::AF_INET } else { libc::AF_INET6 };
    // Blocking on purpose: on a non-blocking socket the ring answers EAGAIN instead of waiting.
    // SAFETY: the call takes no pointers.
    let fd = unsafe { libc::socket(family, libc::SOCK_STREAM | libc::SOCK_CLOEXEC, 0) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the call has just made this descriptor and nobody else has it.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// Tells the peer that nothing more comes.
pub(super) fn shutdown_write(fd: &OwnedFd) {
    // A socket whose peer is gone already refuses it, which is just as well.
    // SAFETY: the call takes no pointers, and `fd` is open.
    unsafe { libc::shutdown(fd.as_raw_fd(), libc::SHUT_WR) };
}

impl SocketRing {
    pub fn new(ring: &Ring) -> Self {
        Self {
            owner: ring.owner(),
            slots: Slab::new(),
            spare: Vec::new(),
            refused: VecDeque::new(),
            nudged: false,
        }
    }

    /// Accepts connections from now on: one after the other (`multishot`) or one.
    pub fn accept(&mut self, fd: &Rc<OwnedFd>, tag: Tag, multishot: bool) -> OpKey {
        let raw = types::Fd(fd.as_raw_fd());
        let entry = if multishot {
            opcode::AcceptMulti::new(raw).flags(libc::SOCK_CLOEXEC).build()
        } else {
            let nowhere = std::ptr::null_mut();
            opcode::Accept::new(raw, nowhere, nowhere.cast()).flags(libc::SOCK_CLOEXEC).build()
        };
        self.push(tag, Op::Accept, Some(fd), entry)
    }

    /// Connects a socket.
    pub fn connect(&mut self, fd: &Rc<OwnedFd>, tag: Tag, to: SocketAddr) -> OpKey {
        let address = Address::new(to);
        let start = (&raw const address.storage).cast();
        let entry = opcode::Connect::new(types::Fd(fd.as_raw_fd()), start, address.len).build();
        self.push(tag, Op::Connect { _address: address }, Some(fd), entry)
    }

    /// Receives into `buffer[from..]`: what there is, or (`whole`) until it is full or the stream ends. `dry`: the
    /// socket was empty when last seen, so that a try before waiting would be wasted.
    pub fn receive(
        &mut self,
        fd: &Rc<OwnedFd>,
        tag: Tag,
        mut buffer: Buffer,
        from: usize,
        how: ReceiveMode,
    ) -> OpKey {
        let place = &mut buffer[from..];
        assert!(!place.is_empty(), "there is room to receive into");
        let len = u32::try_from(place.len()).expect("buffers are smaller than 4 GiB");
        let flags = if how.whole { libc::MSG_WAITALL } else { 0 };
        let entry = opcode::Recv::new(types::Fd(fd.as_raw_fd()), place.as_mut_ptr(), len)
            .flags(flags)
            .ioprio(if how.dry { POLL_FIRST } else { 0 })
            .build();
        self.push(tag, Op::Receive { buffer, from }, Some(fd), entry)
    }

    /// Sends pieces from the front of `queue`, as many as one batch takes, until all are sent or the socket fails.
    pub fn send(&mut self, fd: &Rc<OwnedFd>, tag: Tag, queue: &mut VecDeque<SharedBuffer>) -> OpKey {
        let batch = self.spare.pop().unwrap_or_else(|| Box::into_raw(Batch::new()));
        // SAFETY: batches come from `Box::into_raw` and are freed only in `drop`; one that is spare or new is in no
        // slot, so this function alone has it.
        let inner = unsafe { &mut *batch };
        inner.header.msg_iovlen = 0;
        while inner.pieces.len() < BATCH_PIECES_MAX {
            let Some(piece) = queue.pop_front() else { break };
            inner.push(piece);
        }
        inner.header.msg_iov = (&raw mut inner.vector).cast();
        let flags = (libc::MSG_NOSIGNAL | libc::MSG_WAITALL).cast_unsigned();
        // SAFETY: the batch is alive; only the address of its field is taken.
        let header = unsafe { &raw const (*batch).header };
        let entry = opcode::SendMsg::new(types::Fd(fd.as_raw_fd()), header).flags(flags).build();
        let enters = self.enters();
        self.push(tag, Op::Send { batch, enters }, Some(fd), entry)
    }

    /// Adds pieces to a send that the kernel has not seen yet, so that all frames of one poll are one system call.
    /// `false`: it may have seen it, or there is no room; nothing was added.
    pub fn extend(&mut self, send: OpKey, pieces: &[SharedBuffer]) -> bool {
        let now = self.enters();
        let Some(Slot { op: Op::Send { batch, enters }, .. }) = self.slots.get_mut(send.0) else {
            return false;
        };
        if *enters != now {
            return false;
        }
        // SAFETY: a slot's batch is alive. The kernel reads what an entry names when it is entered, not before (the
        // ring has no polling kernel thread), and it was not entered since this entry was pushed.
        let batch = unsafe { &mut **batch };
        if batch.pieces.len() + pieces.len() > BATCH_PIECES_MAX {
            return false;
        }
        pieces.iter().for_each(|piece| batch.push(piece.clone()));
        true
    }

    /// How often the kernel has been entered through this ring.
    pub fn enters(&self) -> u64 {
        self.owner.ring().stats().enters
    }

    /// Completes after some time.
    pub fn timer(&mut self, tag: Tag, after: Duration) -> OpKey {
        let time = Box::new(types::Timespec::from(after));
        let entry = opcode::Timeout::new(&raw const *time).build();
        self.push(tag, Op::Timer { _time: time }, None, entry)
    }

    /// Completes at once, so that the ring does not park before its owner is polled again.
    pub fn nudge(&mut self, tag: Tag) {
        if !std::mem::replace(&mut self.nudged, true) {
            self.push(tag, Op::Nudge, None, opcode::Nop::new().build());
        }
    }

    /// Asks for the early end of an operation, which is reported as always.
    pub fn cancel(&mut self, key: OpKey) {
        if self.slots.contains(key.0) {
            // Without room for the request the operation goes on until its time; the caller may ask again.
            let _ = self.owner.cancel(key.0 as u64);
        }
    }

    fn push(&mut self, tag: Tag, op: Op, fd: Option<&Rc<OwnedFd>>, entry: Entry) -> OpKey {
        let key = self.slots.insert(Slot { tag, op, _fd: fd.cloned() });
        // SAFETY: the entry names memory of the slot alone (the heap behind its box, pointer or buffer, which does not
        // move with the slot) and its descriptor. The slot is removed when its last completion is taken, or after
        // `Drop` has seen the end of all operations. Nobody can reach a slot's buffer, and `extend` is the
        // only writer to a batch.
        let pushed = unsafe { self.owner.push(entry, key as u64) };
        if pushed.is_err() {
            // Not in the kernel's hands: it ends here, as if the kernel had answered.
            let slot = self.slots.remove(key);
            let done = self.finish(slot.op, -libc::ENOBUFS, 0);
            self.refused.push_back((tag, done));
        }
        OpKey(key)
    }

    /// The next result.
    pub fn take(&mut self) -> Option<(Tag, OpKey, Done)> {
        if let Some((tag, done)) = self.refused.pop_front() {
            return Some((tag, OpKey(usize::MAX), done));
        }
        let completion = self.owner.take()?;
        let key = usize::try_from(completion.user).expect("keys come from a slab");
        if completion.more() {
            let tag = self.slots.get(key).expect("an operation in flight has its slot").tag;
            return Some((tag, OpKey(key), accepted(&completion, true)));
        }
        let slot = self.slots.remove(key);
        Some((slot.tag, OpKey(key), self.finish(slot.op, completion.result, completion.flags)))
    }

    fn finish(&mut self, op: Op, result: i32, flags: u32) -> Done {
        let count = usize::try_from(result).map_err(|_| -result);
        match op {
            Op::Accept => accepted(&RingCompletion { user: 0, result, flags }, false),
            Op::Connect { .. } => Done::Connected(count.map(|_| ())),
            Op::Receive { buffer, from } => {
                Done::Received { buffer, from, result: count, more: cqueue::sock_nonempty(flags) }
            }
            Op::Send { batch, .. } => {
                // SAFETY: the batch is alive, its slot is gone, and the kernel is done with it.
                let left = unsafe { &mut *batch }.take_unsent(count.unwrap_or(0));
                self.spare.push(batch);
                Done::Sent { left, result: count }
            }
            Op::Timer { .. } => Done::Elapsed,
            Op::Nudge => {
                self.nudged = false;
                Done::Nudged
            }
        }
    }

    /// Lets the kernel work and brings in what it has finished, without waiting.
    pub fn turn(&self) -> io::Result<()> {
        self.owner.ring().submit()?;
        self.owner.ring().reap();
        Ok(())
    }
}

fn accepted(completion: &RingCompletion, armed: bool) -> Done {
    let result = if completion.result < 0 {
        Err(-completion.result)
    } else {
        // SAFETY: the kernel has just made this descriptor for this completion, which is taken once.
        Ok(unsafe { OwnedFd::from_raw_fd(completion.result) })
    };
    Done::Accepted { result, armed }
}

impl Drop for SocketRing {
    fn drop(&mut self) {
        for (key, _) in &self.slots {
            let _ = self.owner.cancel(key as u64);
        }
        // Mostly all is over after one turn; taking the results closes descriptors of connections that were being
        // accepted.
        for _ in 0..3 {
            let turned = self.turn().is_ok();
            while turned && self.take().is_some() {}
        }
        for (key, _) in &self.slots {
            // Again for those that had no room.
            let _ = self.owner.cancel(key as u64);
        }
        let ended = self.owner.quiesce().is_ok();
        let slots = std::mem::take(&mut self.slots);
        if !ended {
            // The ring is broken and the kernel may still write: rather lose the memory than lend it again.
            Box::leak(Box::new(slots));
            return;
        }
        for (_, slot) in slots {
            self.finish(slot.op, -libc::ECANCELED, 0);
        }
        for batch in self.spare.drain(..) {
            // SAFETY: made by `Box::into_raw`; with all slots finished every batch is spare, once.
            drop(unsafe { Box::from_raw(batch) });
        }
    }
}

/// How to receive.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct ReceiveMode {
    /// Until the buffer is full.
    pub whole: bool,
    /// The socket was empty when last seen.
    pub dry: bool,
}
