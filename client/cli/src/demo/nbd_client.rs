//! The smallest NBD client that can check a server: fixed newstyle, simple replies, one request at a time.

use std::io::{self, Error, ErrorKind, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

const OPTION_GO: u32 = 7;
const REPLY_ACK: u32 = 1;
const REPLY_INFO: u32 = 3;
const READ: u16 = 0;
const WRITE: u16 = 1;
const DISC: u16 = 2;
const FLUSH: u16 = 3;
/// Bytes of one request.
const REQUEST_LEN_MAX: usize = 4 << 20;
/// How long a reply may take.
const REPLY_MAX: Duration = Duration::from_secs(30);

/// One connection in transmission.
pub struct NbdClient {
    stream: UnixStream,
    cookie: u64,
}

fn broken(what: &str) -> Error {
    Error::new(ErrorKind::InvalidData, what.to_owned())
}

impl NbdClient {
    /// Connects and chooses an export.
    ///
    /// # Errors
    /// When nobody answers, or not as the protocol says.
    pub fn connect(socket: &Path, export: &str) -> io::Result<Self> {
        let mut stream = UnixStream::connect(socket)?;
        stream.set_read_timeout(Some(REPLY_MAX))?;
        let mut greeting = [0; 18];
        stream.read_exact(&mut greeting)?;
        if &greeting[..16] != b"NBDMAGICIHAVEOPT" {
            return Err(broken("this is no NBD server"));
        }
        stream.write_all(&3u32.to_be_bytes())?;
        let name_len = u32::try_from(export.len()).map_err(|_| broken("the name is too long"))?;
        let mut option = b"IHAVEOPT".to_vec();
        option.extend(OPTION_GO.to_be_bytes());
        option.extend((name_len + 6).to_be_bytes());
        option.extend(name_len.to_be_bytes());
        option.extend(export.as_bytes());
        option.extend(0u16.to_be_bytes());
        stream.write_all(&option)?;
        let mut client = Self { stream, cookie: 0 };
        while client.option_reply()? != REPLY_ACK {}
        Ok(client)
    }

    fn option_reply(&mut self) -> io::Result<u32> {
        let mut head = [0; 20];
        self.stream.read_exact(&mut head)?;
        let word = |at: usize| u32::from_be_bytes([head[at], head[at + 1], head[at + 2], head[at + 3]]);
        let (kind, len) = (word(12), word(16));
        let mut data = Vec::new();
        Read::take(&mut self.stream, len.into()).read_to_end(&mut data)?;
        match kind {
            REPLY_ACK | REPLY_INFO => Ok(kind),
            _ => Err(broken(&String::from_utf8_lossy(&data))),
        }
    }

    fn request(&mut self, command: u16, offset: u64, len: usize, payload: &[u8]) -> io::Result<()> {
        self.cookie += 1;
        let mut request = 0x2560_9513u32.to_be_bytes().to_vec();
        request.extend(0u16.to_be_bytes());
        request.extend(command.to_be_bytes());
        request.extend(self.cookie.to_be_bytes());
        request.extend(offset.to_be_bytes());
        request.extend(u32::try_from(len).map_err(|_| broken("too long"))?.to_be_bytes());
        self.stream.write_all(&request)?;
        self.stream.write_all(payload)
    }

    fn reply(&mut self) -> io::Result<()> {
        let mut head = [0; 16];
        self.stream.read_exact(&mut head)?;
        if head[..4] != 0x6744_6698u32.to_be_bytes() || head[8..] != self.cookie.to_be_bytes() {
            return Err(broken("a reply to something else"));
        }
        match u32::from_be_bytes([head[4], head[5], head[6], head[7]]) {
            0 => Ok(()),
            errno => Err(Error::from_raw_os_error(i32::try_from(errno).unwrap_or(i32::MAX))),
        }
    }

    /// Fills `buffer` from `offset` on.
    ///
    /// # Errors
    /// As the server answers.
    pub fn read_at(&mut self, offset: u64, buffer: &mut [u8]) -> io::Result<()> {
        let mut at = offset;
        for chunk in buffer.chunks_mut(REQUEST_LEN_MAX) {
            self.request(READ, at, chunk.len(), &[])?;
            self.reply()?;
            self.stream.read_exact(chunk)?;
            at += chunk.len() as u64;
        }
        Ok(())
    }

    /// Writes `bytes` at `offset`.
    ///
    /// # Errors
    /// As the server answers.
    pub fn write_at(&mut self, offset: u64, bytes: &[u8]) -> io::Result<()> {
        let mut at = offset;
        for chunk in bytes.chunks(REQUEST_LEN_MAX) {
            self.request(WRITE, at, chunk.len(), chunk)?;
            self.reply()?;
            at += chunk.len() as u64;
        }
        Ok(())
    }

    /// Makes what was written durable.
    ///
    /// # Errors
    /// As the server answers.
    pub fn flush(&mut self) -> io::Result<()> {
        self.request(FLUSH, 0, 0, &[])?;
        self.reply()
    }

    /// Ends the connection in order.
    ///
    /// # Errors
    /// When the server does not close it.
    pub fn disconnect(mut self) -> io::Result<()> {
        self.request(DISC, 0, 0, &[])?;
        match self.stream.read(&mut [0; 1])? {
            0 => Ok(()),
            _ => Err(broken("something came after the end")),
        }
    }
}
