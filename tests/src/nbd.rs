//! A small blocking NBD client, written from the protocol document and apart from our server.

use anyhow::{Context, Result, bail, ensure};
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

const OPTION_MAGIC: u64 = 0x4948_4156_454f_5054;
const REQUEST_MAGIC: u32 = 0x2560_9513;
const REPLY_MAGIC: u32 = 0x6744_6698;

/// What to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u16)]
pub enum Command {
    /// Data comes back.
    Read = 0,
    /// Data goes along.
    Write = 1,
    /// Ends the connection.
    Disconnect = 2,
    /// Makes completed writes durable.
    Flush = 3,
    /// Frees blocks.
    Trim = 4,
    /// Makes the range zero.
    WriteZeroes = 6,
}

/// An answer.
#[derive(Debug)]
pub struct Reply {
    /// The request's cookie.
    pub cookie: u64,
    /// 0, or an NBD error number.
    pub error: u32,
    /// The data of a read.
    pub data: Vec<u8>,
}

/// A connection to one export.
pub struct Connection {
    stream: UnixStream,
    size: u64,
    flags: u16,
    reads: std::collections::BTreeMap<u64, usize>,
}

impl Connection {
    /// Opens `export` by NBD_OPT_EXPORT_NAME. Every later wait for an answer ends after `patience`.
    pub fn open(socket: &Path, export: &str, patience: Duration) -> Result<Self> {
        let mut stream =
            UnixStream::connect(socket).with_context(|| format!("connect to {}", socket.display()))?;
        stream.set_read_timeout(Some(patience))?;
        stream.set_write_timeout(Some(patience))?;
        let mut greeting = [0; 18];
        stream.read_exact(&mut greeting)?;
        ensure!(&greeting[..8] == b"NBDMAGIC" && &greeting[8..16] == b"IHAVEOPT", "not fixed newstyle NBD");
        stream.write_all(&3u32.to_be_bytes())?; // fixed newstyle, no zeroes
        stream.write_all(&OPTION_MAGIC.to_be_bytes())?;
        stream.write_all(&1u32.to_be_bytes())?;
        stream.write_all(&u32::try_from(export.len())?.to_be_bytes())?;
        stream.write_all(export.as_bytes())?;
        let mut answer = [0; 10];
        stream.read_exact(&mut answer).with_context(|| format!("open export {export}"))?;
        let size = u64::from_be_bytes(answer[..8].try_into()?);
        let flags = u16::from_be_bytes(answer[8..].try_into()?);
        Ok(Self { stream, size, flags, reads: Default::default() })
    }

    /// Bytes of the export.
    pub fn size(&self) -> u64 {
        self.size
    }

    /// Transmission flags.
    pub fn flags(&self) -> u16 {
        self.flags
    }

    /// Sends a request.
    pub fn send(&mut self, command: Command, cookie: u64, offset: u64, len: u32, data: &[u8]) -> Result<()> {
        let mut head = Vec::with_capacity(28 + data.len());
        head.extend_from_slice(&REQUEST_MAGIC.to_be_bytes());
        head.extend_from_slice(&0u16.to_be_bytes());
        head.extend_from_slice(&(command as u16).to_be_bytes());
        head.extend_from_slice(&cookie.to_be_bytes());
        head.extend_from_slice(&offset.to_be_bytes());
        head.extend_from_slice(&len.to_be_bytes());
        head.extend_from_slice(data);
        if command == Command::Read {
            self.reads.insert(cookie, len as usize);
        }
        self.stream.write_all(&head).context("send an NBD request")
    }

    /// Waits for the next answer.
    pub fn receive(&mut self) -> Result<Reply> {
        let mut head = [0; 16];
        self.stream.read_exact(&mut head).context("wait for an NBD answer")?;
        if u32::from_be_bytes(head[..4].try_into()?) != REPLY_MAGIC {
            bail!("the answer does not begin with the magic of a simple reply");
        }
        let error = u32::from_be_bytes(head[4..8].try_into()?);
        let cookie = u64::from_be_bytes(head[8..].try_into()?);
        let len = self.reads.remove(&cookie).unwrap_or(0);
        let mut data = vec![0; if error == 0 { len } else { 0 }];
        self.stream.read_exact(&mut data).context("read the data of an NBD answer")?;
        Ok(Reply { cookie, error, data })
    }

    /// Reads `len` bytes at `offset` with nothing else in flight.
    pub fn read(&mut self, offset: u64, len: u32) -> Result<Vec<u8>> {
        self.send(Command::Read, 1, offset, len, &[])?;
        let reply = self.receive()?;
        ensure!(reply.error == 0, "reading {len} bytes at {offset} failed with NBD error {}", reply.error);
        Ok(reply.data)
    }

    /// Writes with nothing else in flight.
    pub fn write(&mut self, offset: u64, data: &[u8]) -> Result<()> {
        self.call(Command::Write, offset, u32::try_from(data.len())?, data)
    }

    /// Sends a request without returned data and waits for its answer, with nothing else in flight.
    pub fn call(&mut self, command: Command, offset: u64, len: u32, data: &[u8]) -> Result<()> {
        self.send(command, 1, offset, len, data)?;
        let reply = self.receive()?;
        ensure!(
            reply.error == 0,
            "{command:?} of {len} bytes at {offset} failed with NBD error {}",
            reply.error
        );
        Ok(())
    }

    /// Says goodbye.
    pub fn close(mut self) -> Result<()> {
        self.send(Command::Disconnect, 0, 0, 0, &[])
    }
}
