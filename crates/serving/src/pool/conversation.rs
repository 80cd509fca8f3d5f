//! The asynchronous way (`asyncCommunication: true`): requests are sent as they come, their replies
//! come as they are ready. One thread sends, another one listens.
//!
//! At most as many requests are with the worker as its queue may hold; the rest waits in the queue,
//! so that its limit keeps its meaning. A request without a word for `responseTimeout` fails alone
//! and is broken off; a worker that then says nothing at all for as long again is lost.

use std::collections::HashMap;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};
use ts_types::InferRequest;
use ts_wire::frame::{RunFailure, WorkerReply, WorkerRequest};
use ts_wire::{Departures, Receiver, Sender, WireError};

use crate::course::Together;
use crate::error::{ServingError, StartFailure};
use crate::job::Ran;
use crate::names::Claim;
use crate::pool::dispatcher::{Dispatcher, End, Worker};
use crate::pool::exchange::{Held, LOOK_EVERY, Payload, each_part, hand_over, reply};
use crate::pool::ranks::Ranks;

/// The requests that the worker has.
struct InFlight<'d> {
    dispatcher: &'d Dispatcher,
    state: Mutex<State>,
    /// One has ended, or the worker is lost.
    room: Condvar,
    /// The worker is lost: nothing more can be handed to it.
    lost: AtomicBool,
    /// Nothing more will be handed to it.
    finishing: AtomicBool,
    /// The worker is to be replaced when it has finished what it has.
    over_memory: OnceLock<StartFailure>,
}

#[derive(Default)]
struct State {
    requests: HashMap<String, Request>,
}

struct Request {
    handed_over: Instant,
    due: Option<Instant>,
    /// `None` once it was answered for its silence.
    held: Option<Held>,
    /// Since when it is to be broken off.
    broken_off: Option<Instant>,
    /// The worker was told so.
    told: bool,
    /// No other request may have its id as long as the worker has it.
    #[expect(dead_code, reason = "held for its drop")]
    claim: Option<Claim>,
}

impl Dispatcher {
    /// Serves until the worker is lost or the slot is to end; then what it has is finished.
    pub(super) fn converse(&self, worker: &mut Worker) -> End {
        let Worker {
            host,
            channel,
            departures,
            ..
        } = worker;
        let (host, departures) = (&*host, &*departures);
        let (sender, receiver) = channel.halves();
        let sender = Mutex::new(sender);
        let in_flight = InFlight {
            dispatcher: self,
            state: Mutex::default(),
            room: Condvar::new(),
            lost: AtomicBool::new(false),
            finishing: AtomicBool::new(false),
            over_memory: OnceLock::new(),
        };
        let listened = std::thread::scope(|scope| {
            let listening = std::thread::Builder::new()
                .name(format!("{}-replies", self.name()))
                .spawn_scoped(scope, || {
                    let _lost_when_it_returns = LostAtEnd(&in_flight);
                    let listened = self.listen(receiver, &sender, departures, &in_flight);
                    if listened
                        .as_ref()
                        .is_err_and(|error| !matches!(error, WireError::Closed))
                    {
                        // The other thread may wait for it to read.
                        host.kill();
                    }
                    listened
                });
            let listening = match listening {
                Ok(listening) => listening,
                Err(source) => {
                    return Err(WireError::System {
                        call: "spawning a thread",
                        source,
                    });
                }
            };
            // However this ends, the other thread is to end too.
            let finishing = FinishingAtEnd(&in_flight);
            let sent = self.send_on(&sender, departures, &in_flight, || host.is_alive());
            if let Err(error) = &sent {
                // Whoever listens has to see it too.
                tracing::warn!(worker = self.name(), %error, "a request cannot be handed over");
                host.kill();
            }
            drop(finishing);
            let listened = listening.join().unwrap_or(Err(WireError::Closed));
            sent.and(listened)
        });
        let over_memory = in_flight.over_memory.get().cloned();
        match listened {
            Ok(()) if let Some(failure) = over_memory => End::Lost(failure),
            Ok(()) if self.ending() => End::Asked,
            Ok(()) => {
                let during = "while it was idle";
                End::LostIdle(self.lost(host, &WireError::Closed, during, Duration::ZERO))
            }
            Err(error) => {
                let limit = self.spec.limits.read().response_timeout;
                let failure = self.lost(host, &error, "while it served", limit);
                for request in in_flight.state.into_inner().requests.into_values() {
                    if let Some(held) = request.held {
                        held.job.fail(ServingError::WorkerDied {
                            out_of_memory: failure.out_of_memory,
                        });
                    }
                }
                End::Lost(failure)
            }
        }
    }

    /// Hands requests over as they come, until the slot is to end or the worker is lost.
    fn send_on(
        &self,
        sender: &Mutex<&mut Sender>,
        departures: &Departures,
        in_flight: &InFlight,
        host_is_alive: impl Fn() -> bool,
    ) -> Result<(), WireError> {
        let bound = || self.spec.limits.read().job_queue_size.max(1);
        let over = || {
            self.control.stopping()
                || in_flight.lost.load(Ordering::SeqCst)
                || in_flight.over_memory.get().is_some()
                || !host_is_alive()
        };
        loop {
            {
                let mut state = in_flight.state.lock();
                while state.requests.len() >= bound() && !over() {
                    in_flight.room.wait_for(&mut state, LOOK_EVERY);
                }
            }
            let Some(batch) = self.wait_for_batch(&over) else {
                return Ok(());
            };
            let limit = self.spec.limits.read().response_timeout;
            // A worker of several is refused this way at its registration.
            let ranks = &mut Ranks::default();
            for (mut job, running) in batch.singly() {
                // Once the worker has it, only its names are needed.
                let request = InferRequest {
                    parts: std::mem::take(&mut job.request.parts),
                    headers: std::mem::take(&mut job.request.headers),
                    ..job.request.clone()
                };
                in_flight.add(Held::single((job, running)), limit);
                let items = std::iter::once((&request, false));
                let told = departures.were_told();
                let handed = {
                    let mut sender = sender.lock();
                    sender
                        .limit(limit)
                        .and_then(|()| hand_over(&mut sender, ranks, items, Payload::Inline, told))
                };
                let Err(error) = handed else { continue };
                let removed = in_flight.remove(request.id.as_str());
                let job = removed.and_then(|request| Some(request.held?.job));
                match (error, job) {
                    // It never reached a worker, so another may have it.
                    (WireError::Closed, job) => {
                        let whole = job.map(|mut job| {
                            job.request = request;
                            job
                        });
                        self.spec.queue.put_back(whole.into_iter().collect());
                        return Ok(());
                    }
                    (error @ WireError::TimedOut, job) => {
                        if let Some(job) = job {
                            job.fail(ServingError::NoResponse { limit });
                        }
                        return Err(error);
                    }
                    (error, job) => {
                        let reason = error.to_string();
                        if let Some(job) = job {
                            job.fail(ServingError::NotHandedOver { reason });
                        }
                        if !error.is_before_sending() {
                            return Err(error);
                        }
                    }
                }
            }
        }
    }

    /// Answers requests until nothing more is to come.
    fn listen(
        &self,
        receiver: &mut Receiver,
        sender: &Mutex<&mut Sender>,
        departures: &Departures,
        in_flight: &InFlight,
    ) -> Result<(), WireError> {
        let unread_limit = self.unread_limit();
        let mut heard = Instant::now();
        let mut looked = heard;
        loop {
            let limit = self.spec.limits.read().response_timeout;
            if let Some(incoming) = receiver.receive_within(LOOK_EVERY)? {
                heard = Instant::now();
                match incoming.header()? {
                    WorkerReply::Chunks(chunks) => {
                        let mut state = in_flight.state.lock();
                        each_part(chunks, incoming.payload, |id, handler, part| match part {
                            Ok(reply) => {
                                let Some(request) = state.requests.get_mut(id) else {
                                    return;
                                };
                                request.due = heard.checked_add(limit);
                                let ran = Ran {
                                    handed_over: request.handed_over,
                                    answered: heard,
                                    handler,
                                };
                                if let Some(held) = &mut request.held {
                                    held.part(reply, ran, unread_limit, departures);
                                }
                            }
                            Err(failure) => {
                                in_flight.failed(&failure);
                                let request = state.requests.get_mut(id);
                                if let Some(held) = request.and_then(|request| request.held.take())
                                {
                                    held.job.fail(ServingError::Run(failure));
                                }
                            }
                        })?;
                    }
                    WorkerReply::Answered(done) => {
                        let outcome = reply(done.outcome, &mut { incoming.payload })?;
                        let request = in_flight.remove(done.request_id);
                        if let Err(failure) = &outcome {
                            in_flight.failed(failure);
                        }
                        self.answered();
                        if let Some(request) = request {
                            if let Some(Held { job, .. }) = request.held {
                                let ran = Ran {
                                    handed_over: request.handed_over,
                                    answered: heard,
                                    handler: Duration::from_micros(done.ran_micros),
                                };
                                match outcome {
                                    Ok(reply) => job.succeed(reply, ran),
                                    Err(failure) => {
                                        job.ran(ran);
                                        job.fail(ServingError::Run(failure));
                                    }
                                }
                            }
                            self.record(&done.metrics, 1, heard);
                        }
                    }
                    _ => return Err(WireError::Malformed("words that answer no request")),
                }
            }
            if looked.elapsed() >= LOOK_EVERY {
                looked = Instant::now();
                self.look(sender, departures, in_flight, heard, limit)?;
            }
            if in_flight.finishing.load(Ordering::SeqCst)
                && in_flight.state.lock().requests.is_empty()
            {
                return Ok(());
            }
        }
    }

    /// Looks for callers that have left and for requests whose time is over.
    fn look(
        &self,
        sender: &Mutex<&mut Sender>,
        departures: &Departures,
        in_flight: &InFlight,
        heard: Instant,
        limit: Duration,
    ) -> Result<(), WireError> {
        let now = Instant::now();
        let mut silent = false;
        let mut state = in_flight.state.lock();
        state.requests.retain(|id, request| {
            if let Some(held) = &mut request.held {
                held.tell_departure(departures);
            }
            let over = request.due.is_some_and(|due| due <= now);
            match request.broken_off {
                None if over => {
                    if let Some(held) = request.held.take() {
                        held.job.fail(ServingError::NoResponse { limit });
                    }
                    request.broken_off = Some(now);
                    request.due = now.checked_add(limit);
                }
                Some(since) if over => {
                    silent |= heard <= since;
                    // If not, it does not end, but its worker has life in it.
                    return false;
                }
                None | Some(_) => {}
            }
            if request.broken_off.is_some() && !request.told {
                // Without any wait, neither for the other thread nor for room: the worker may not
                // read, and this thread is the one to notice.
                request.told = sender.try_lock().is_some_and(|mut sender| {
                    let cancel = WorkerRequest::Cancel { request_id: id };
                    sender.try_send(&cancel).unwrap_or(false)
                });
            }
            true
        });
        in_flight.removed(&state);
        drop(state);
        if silent {
            return Err(WireError::TimedOut);
        }
        Ok(())
    }
}

impl InFlight<'_> {
    fn add(&self, held: Held, limit: Duration) {
        let now = Instant::now();
        let id = held.job.request.id.as_str().to_owned();
        let claim = held.job.claim.clone();
        let batch = Together::of(std::iter::once(&held.job));
        held.job.handed_over(now, self.dispatcher.id, &batch);
        let request = Request {
            handed_over: now,
            due: now.checked_add(limit),
            held: Some(held),
            broken_off: None,
            told: false,
            claim,
        };
        let mut state = self.state.lock();
        state.requests.insert(id, request);
        self.dispatcher.control.has_work();
    }

    fn remove(&self, id: &str) -> Option<Request> {
        let mut state = self.state.lock();
        let request = state.requests.remove(id);
        self.removed(&state);
        request
    }

    /// Nothing more is handed to a worker that was refused memory.
    fn failed(&self, failure: &RunFailure) {
        if let Some(failure) = self.dispatcher.over_memory([failure])
            && self.over_memory.set(failure).is_ok()
        {
            self.dispatcher.spec.queue.wake_all();
        }
    }

    /// Makes known that there may be room now.
    fn removed(&self, state: &State) {
        self.room.notify_one();
        let control = &self.dispatcher.control;
        if state.requests.is_empty() && control.idle_since().is_none() {
            self.dispatcher.slots.work_ended(control);
        }
    }
}

/// Makes the end of the sending thread known to the one that listens.
struct FinishingAtEnd<'f>(&'f InFlight<'f>);

impl Drop for FinishingAtEnd<'_> {
    fn drop(&mut self) {
        self.0.finishing.store(true, Ordering::SeqCst);
    }
}

/// Makes the end of the listening thread known to the one that sends.
struct LostAtEnd<'l>(&'l InFlight<'l>);

impl Drop for LostAtEnd<'_> {
    fn drop(&mut self) {
        self.0.lost.store(true, Ordering::SeqCst);
        self.0.room.notify_all();
        self.0.dispatcher.spec.queue.wake_all();
    }
}
