//! The connection to a mon: session, maps, admin commands.
//!
//! One mon of the list at a time; when it is lost, the next one after a growing pause. The session outlives the
//! connection. OSDs are served on without a mon (DESIGN section 6).

use super::backoff;
use super::wire::{LinkDown, Refused, Wire};
use crate::error::{CommandError, ConnectError};
use loligo_config::id::{CoreId, Epoch};
use loligo_net::outage::Outage;
use loligo_net::wire::handshake::{RefuseReason, Role};
use loligo_net::wire::{Message, REQUEST_DATA_LEN_MAX, mon};
use loligo_reactor::dma::BufferPool;
use loligo_reactor::env::{ConnectionId, Instant, Ticket};
use serde_json::Value;
use std::collections::VecDeque;
use std::net::SocketAddr;
use std::time::Duration;

const RETRY_FIRST: Duration = Duration::from_millis(20);
const RETRY_MAX: Duration = Duration::from_secs(1);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Idle { retry_at: Instant },
    Connecting { connection: ConnectionId, mon: SocketAddr },
    Up { connection: ConnectionId, subscribed: bool },
}

#[derive(Clone, Debug, PartialEq)]
enum Stage {
    /// To be sent.
    Queued,
    /// Sent over the connection that is up now.
    Sent,
    /// Answered; the map in which its effect is seen has not come yet.
    Answered { epoch: Epoch, result: Result<Value, CommandError> },
}

#[derive(Debug)]
struct Command {
    number: u64,
    ticket: Ticket,
    text: String,
    /// It changes nothing: it may be sent again.
    harmless: bool,
    stage: Stage,
}

/// See the module.
#[derive(Debug)]
pub(super) struct MonLink {
    mons: Vec<SocketAddr>,
    next: usize,
    state: State,
    attempts: u32,
    problem: Option<ConnectError>,
    /// Mons that refused this client for good, one behind the other.
    refusals: usize,
    outage: Outage,
    commands: VecDeque<Command>,
    last_number: u64,
    pub(super) answers: VecDeque<(Ticket, Result<Value, CommandError>)>,
}

impl MonLink {
    pub(super) fn new(mons: Vec<SocketAddr>) -> Self {
        Self {
            mons,
            next: 0,
            state: State::Idle { retry_at: Instant(0) },
            attempts: 0,
            problem: None,
            refusals: 0,
            outage: Outage::default(),
            commands: VecDeque::new(),
            last_number: 0,
            answers: VecDeque::new(),
        }
    }

    pub(super) fn problem(&self) -> Option<&ConnectError> {
        self.problem.as_ref()
    }

    /// Whether every mon has refused this client for a reason that does not go away by itself.
    pub(super) fn is_refused(&self) -> bool {
        self.refusals > 0 && self.refusals >= self.mons.len()
    }

    pub(super) fn is(&self, connection: ConnectionId) -> bool {
        self.connection() == Some(connection)
    }

    pub(super) fn connection(&self) -> Option<ConnectionId> {
        match self.state {
            State::Idle { .. } => None,
            State::Connecting { connection, .. } | State::Up { connection, .. } => Some(connection),
        }
    }

    pub(super) fn has_commands(&self) -> bool {
        !self.commands.is_empty()
    }

    /// A command was sent and not answered.
    pub(super) fn is_expecting(&self) -> bool {
        self.commands.iter().any(|command| command.stage == Stage::Sent)
    }

    pub(super) fn deadline(&self) -> Option<Instant> {
        let retry = match self.state {
            State::Idle { retry_at } if !self.mons.is_empty() => Some(retry_at),
            _ => None,
        };
        [retry, self.outage.deadline()].into_iter().flatten().min()
    }

    pub(super) fn command(&mut self, request: &Value, ticket: Ticket) {
        let text = request.to_string();
        if text.len() > REQUEST_DATA_LEN_MAX as usize {
            self.answers.push_back((ticket, Err(CommandError::TooLong)));
            return;
        }
        self.last_number += 1;
        let harmless = is_harmless(request);
        self.commands.push_back(Command {
            number: self.last_number,
            ticket,
            text,
            harmless,
            stage: Stage::Queued,
        });
    }

    pub(super) fn up(&mut self) {
        if let State::Connecting { connection, .. } = self.state {
            self.state = State::Up { connection, subscribed: false };
            self.attempts = 0;
            self.refusals = 0;
            self.problem = Some(ConnectError::NoMap);
            if self.outage.found() {
                tracing::warn!("a mon answers now");
            }
        }
    }

    /// The session is given up on purpose: connect again at once.
    pub(super) fn restart(&mut self) {
        self.state = State::Idle { retry_at: Instant(0) };
        self.resolve_sent();
    }

    pub(super) fn down(&mut self, now: Instant, reason: LinkDown) {
        let is_final = matches!(reason, LinkDown::Refused(reason) if reason.is_final());
        self.refusals = if is_final { self.refusals + 1 } else { 0 };
        self.problem = Some(match (reason, self.state) {
            (LinkDown::Refused(reason), State::Connecting { mon, .. }) => {
                ConnectError::Refused { mon: mon.to_string(), reason }
            }
            _ => {
                let mons: Vec<String> = self.mons.iter().map(SocketAddr::to_string).collect();
                ConnectError::NoMon { mons: mons.join(", "), reason: reason.to_string() }
            }
        });
        let wait = backoff(RETRY_FIRST, self.attempts, RETRY_MAX);
        self.attempts = self.attempts.saturating_add(1);
        self.next = (self.next + 1) % self.mons.len().max(1);
        self.state = State::Idle { retry_at: now.after(wait) };
        self.resolve_sent();
    }

    /// What was sent and not answered is sent again if that can do no harm, else its end is unknown.
    fn resolve_sent(&mut self) {
        for mut command in std::mem::take(&mut self.commands) {
            match command.stage {
                Stage::Sent if command.harmless => {
                    command.stage = Stage::Queued;
                    self.commands.push_back(command);
                }
                Stage::Sent => self.answers.push_back((command.ticket, Err(CommandError::MaybeApplied))),
                Stage::Queued | Stage::Answered { .. } => self.commands.push_back(command),
            }
        }
    }

    pub(super) fn fail_all(&mut self) {
        for command in self.commands.drain(..) {
            self.answers.push_back((command.ticket, Err(CommandError::Fenced)));
        }
    }

    /// The answer to a command; it is held back until the map that shows its effect is there.
    pub(super) fn answer(&mut self, number: u64, epoch: Epoch, data: Option<&[u8]>, have: Epoch) {
        let found = self.commands.iter_mut().find(|c| c.number == number && c.stage == Stage::Sent);
        let Some(command) = found else { return };
        command.stage = Stage::Answered { epoch, result: parse_answer(data) };
        self.release(have);
    }

    /// Hands out the answers whose effect is seen in the map with epoch `have`.
    pub(super) fn release(&mut self, have: Epoch) {
        for command in std::mem::take(&mut self.commands) {
            match command.stage {
                Stage::Answered { epoch, result } if epoch <= have || result.is_err() => {
                    self.answers.push_back((command.ticket, result));
                }
                _ => self.commands.push_back(command),
            }
        }
    }

    /// Connects, subscribes and sends what waits.
    pub(super) fn poll<W: Wire>(&mut self, now: Instant, have: Epoch, pool: &BufferPool, wire: &mut W) {
        if let State::Idle { retry_at } = self.state
            && retry_at <= now
            && let Some(mon) = self.mons.get(self.next).copied()
        {
            let connection = wire.connect(mon, Role::Mon, CoreId(0));
            self.state = State::Connecting { connection, mon };
        }
        self.note_outage(now);
        let State::Up { connection, subscribed } = &mut self.state else { return };
        if !*subscribed {
            let message = Message::Subscribe(mon::Subscribe { have });
            *subscribed = wire.send(*connection, message, None, 0).is_ok();
        }
        for command in self.commands.iter_mut().filter(|command| command.stage == Stage::Queued) {
            let Ok(data) = pool.copy_of(command.text.as_bytes()) else { return };
            let message = Message::Command(mon::Command { number: command.number });
            match wire.send(*connection, message, Some(data), 0) {
                Ok(()) => command.stage = Stage::Sent,
                Err(Refused::Full | Refused::Closed) => return,
            }
        }
    }

    /// Open images are served on without a mon, but not when something fails: somebody should look.
    fn note_outage(&mut self, now: Instant) {
        if matches!(self.state, State::Up { .. }) || self.mons.is_empty() {
            return;
        }
        self.outage.lost(now);
        if self.outage.is_due(now)
            && let Some(problem) = &self.problem
        {
            tracing::warn!("{problem}");
        }
    }

    /// Whether something waits to be sent over a connection that is up.
    pub(super) fn has_unsent(&self) -> bool {
        let State::Up { subscribed, .. } = self.state else { return false };
        !subscribed || self.commands.iter().any(|command| command.stage == Stage::Queued)
    }

    /// The mon keeps a fenced session out.
    pub(super) fn is_fence(reason: LinkDown) -> bool {
        reason == LinkDown::Refused(RefuseReason::Fenced)
    }
}

fn parse_answer(data: Option<&[u8]>) -> Result<Value, CommandError> {
    let mut value: Value =
        serde_json::from_slice(data.unwrap_or_default()).map_err(|_| CommandError::BadAnswer)?;
    if let Some(error) = value.get("error") {
        let code = error.get("code").and_then(Value::as_i64).unwrap_or(-5);
        let message = error.get("message").and_then(Value::as_str).unwrap_or("the mon gave no reason");
        return Err(CommandError::Refused { code, message: message.to_owned() });
    }
    value.get_mut("ok").map(Value::take).ok_or(CommandError::BadAnswer)
}

/// Whether a command only asks: its verb is one of those that change nothing.
fn is_harmless(request: &Value) -> bool {
    const ASKING: [&str; 12] = [
        "status", "health", "tree", "df", "dump", "ls", "get", "stat", "stats", "detail", "versions", "check",
    ];
    let prefix = request.get("prefix").and_then(Value::as_str).unwrap_or_default();
    prefix.split_whitespace().next_back().is_some_and(|verb| ASKING.contains(&verb))
}
