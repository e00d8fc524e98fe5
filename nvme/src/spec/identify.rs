//! Identify data structures (NVMe Base 2.0 §5.17.2, NVM 1.0 §4.1.5).

use super::{bytes, u8_at, u16_at, u32_at, u64_at};
use std::time::Duration;

/// CNS of Identify Namespace (NVM 1.0 §4.1.5.1).
pub const CNS_NAMESPACE: u8 = 0x00;
/// CNS of Identify Controller (§5.17.2.1).
pub const CNS_CONTROLLER: u8 = 0x01;
/// CNS of the list of active namespaces (§5.17.2.2).
pub const CNS_NAMESPACE_LIST: u8 = 0x02;
/// CNS of the I/O command set's own controller data (NVM 1.0 §4.1.5.2).
pub const CNS_COMMAND_SET_CONTROLLER: u8 = 0x06;

/// Text of `N` bytes padded with spaces, without what cannot be printed.
fn text<const N: usize>(data: &[u8], at: usize) -> String {
    let printable = |byte: &u8| byte.is_ascii_graphic() || *byte == b' ';
    let kept = bytes::<N>(data, at).into_iter().filter(printable).map(char::from).collect::<String>();
    kept.trim().to_owned()
}

/// Identify Controller (NVMe Base 2.0 figure 275): the fields that the driver obeys or shows.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct IdentifyController {
    /// VID: the maker.
    pub vendor: u16,
    /// SN.
    pub serial: String,
    /// MN.
    pub model: String,
    /// FR.
    pub firmware: String,
    /// MDTS: largest transfer as a power of two of pages of CAP.MPSMIN; 0 for no limit.
    pub mdts: u8,
    /// CNTLID.
    pub controller_id: u16,
    /// VER, as the register.
    pub version: u32,
    /// CRDT1 to CRDT3: delays before a retry, in units of 100 ms.
    pub retry_delays: [u16; 3],
    /// OACS bit 8: Doorbell Buffer Config.
    pub shadow_doorbells: bool,
    /// ACL: Abort commands at once, 1-based here.
    pub aborts_max: u16,
    /// WCTEMP in kelvins, 0 if not reported.
    pub warning_temperature_kelvin: u16,
    /// CCTEMP in kelvins, 0 if not reported.
    pub critical_temperature_kelvin: u16,
    /// SQES: smallest submission queue entry, as a power of two.
    pub sq_entry_shift_min: u8,
    /// CQES: smallest completion queue entry, as a power of two.
    pub cq_entry_shift_min: u8,
    /// NN: highest namespace number.
    pub namespaces_max: u32,
    /// ONCS bit 0: Compare.
    pub compares: bool,
    /// ONCS bit 2: Dataset Management.
    pub deallocates: bool,
    /// ONCS bit 3: Write Zeroes.
    pub writes_zeroes: bool,
    /// VWC bit 0: there is a volatile write cache.
    pub volatile_write_cache: bool,
    /// AWUPF: logical blocks that are written all or nothing across a power failure, 1-based here.
    pub atomic_power_fail_blocks: u32,
    /// SGLS bits 1:0 are not 00b: SGLs can be used with NVM commands.
    pub sgls: bool,
}

impl IdentifyController {
    /// From the 4 KiB data structure.
    pub fn parse(data: &[u8]) -> Self {
        let commands = u16_at(data, 520);
        Self {
            vendor: u16_at(data, 0),
            serial: text::<20>(data, 4),
            model: text::<40>(data, 24),
            firmware: text::<8>(data, 64),
            mdts: u8_at(data, 77),
            controller_id: u16_at(data, 78),
            version: u32_at(data, 80),
            retry_delays: [u16_at(data, 128), u16_at(data, 130), u16_at(data, 132)],
            shadow_doorbells: u16_at(data, 256) >> 8 & 1 == 1,
            aborts_max: u16::from(u8_at(data, 258)) + 1,
            warning_temperature_kelvin: u16_at(data, 266),
            critical_temperature_kelvin: u16_at(data, 268),
            sq_entry_shift_min: u8_at(data, 512) & 0xf,
            cq_entry_shift_min: u8_at(data, 513) & 0xf,
            namespaces_max: u32_at(data, 516),
            compares: commands & 1 == 1,
            deallocates: commands >> 2 & 1 == 1,
            writes_zeroes: commands >> 3 & 1 == 1,
            volatile_write_cache: u8_at(data, 525) & 1 == 1,
            atomic_power_fail_blocks: u32::from(u16_at(data, 528)) + 1,
            sgls: u32_at(data, 536) & 3 != 0,
        }
    }

    /// Largest transfer in bytes: `None` without a limit, or with one past what 32 bits hold.
    pub fn transfer_len_max(&self, page_shift_min: u32) -> Option<u32> {
        let shift = page_shift_min.checked_add(self.mdts.into())?;
        if self.mdts == 0 { None } else { 1u32.checked_shl(shift) }
    }

    /// How long to wait before a retry, by the CRD field of the status (NVMe Base 2.0 §3.3.3.2.1).
    pub fn retry_delay(&self, crd: u8) -> Duration {
        let index = usize::from(crd).checked_sub(1);
        let units = index.and_then(|index| self.retry_delays.get(index)).copied().unwrap_or(0);
        Duration::from_millis(100 * u64::from(units))
    }
}

/// Identify Namespace (NVM 1.0 figure 97): the fields that the driver obeys.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct IdentifyNamespace {
    /// NSZE: logical blocks.
    pub blocks: u64,
    /// LBADS of the format in use: a logical block is 2^n bytes.
    pub lba_shift: u8,
    /// MS of the format in use: bytes of metadata with each block.
    pub metadata_len: u16,
    /// DPS bits 2:0: the type of end-to-end protection, 0 for none.
    pub protection: u8,
    /// NAWUPF, 1-based, where the namespace has its own (NSFEAT bit 1).
    pub atomic_power_fail_blocks: Option<u32>,
    /// NABSPF, 1-based: writes that cross a multiple of it are not atomic; `None` where there is no boundary.
    pub atomic_boundary_blocks: Option<u32>,
    /// NABO: the first logical block from which boundaries are counted.
    pub atomic_boundary_offset: u32,
    /// NSATTR bit 0: write protected now.
    pub write_protected: bool,
    /// NGUID, zeroes if there is none.
    pub nguid: [u8; 16],
    /// EUI64, zeroes if there is none.
    pub eui64: [u8; 8],
}

impl IdentifyNamespace {
    /// From the 4 KiB data structure; `None` when it names a format that it does not have.
    pub fn parse(data: &[u8]) -> Option<Self> {
        let (last, chosen) = (u8_at(data, 25), u8_at(data, 26));
        // FLBAS bits 6:5 are the upper bits of the index where there are more than 16 formats.
        let upper = if last > 15 { chosen >> 5 & 3 } else { 0 };
        let index = usize::from(upper << 4 | chosen & 0xf);
        if index > usize::from(last) || index > 63 {
            return None;
        }
        let format = u32_at(data, 128 + 4 * index);
        let boundary = u16_at(data, 44);
        let own_atomicity = u8_at(data, 24) >> 1 & 1 == 1;
        Some(Self {
            blocks: u64_at(data, 0),
            lba_shift: (format >> 16) as u8,
            metadata_len: format as u16,
            protection: u8_at(data, 29) & 7,
            atomic_power_fail_blocks: own_atomicity.then(|| u32::from(u16_at(data, 36)) + 1),
            atomic_boundary_blocks: (boundary != 0).then(|| u32::from(boundary) + 1),
            atomic_boundary_offset: u16_at(data, 42).into(),
            write_protected: u8_at(data, 99) & 1 == 1,
            nguid: bytes(data, 104),
            eui64: bytes(data, 120),
        })
    }
}

/// The namespaces of a list (§5.17.2.2): ascending numbers, ended by zero. At most `limit`.
pub fn namespace_list(data: &[u8], limit: usize) -> Vec<u32> {
    let numbers = data.chunks_exact(4).map(|chunk| u32_at(chunk, 0));
    let mut found: Vec<u32> =
        numbers.take_while(|nsid| *nsid != 0 && *nsid < 0xffff_fffe).take(limit).collect();
    found.sort_unstable();
    found.dedup();
    found
}

/// Largest Write Zeroes (WZSL, NVM 1.0 figure 102) in bytes; `None` where it is not reported.
pub fn write_zeroes_len_max(data: &[u8], page_shift_min: u32) -> Option<u64> {
    let shift = u8_at(data, 1);
    if shift == 0 { None } else { 1u64.checked_shl(page_shift_min.saturating_add(shift.into())) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn controller() -> Vec<u8> {
        let mut data = vec![0; 4096];
        data[..2].copy_from_slice(&[0x36, 0x1b]);
        data[4..24].copy_from_slice(b"SERIAL-1            ");
        data[24..64].copy_from_slice(b"A model                                 ");
        data[64..72].copy_from_slice(b"1.0\0\x01\xff  ");
        data[77] = 7;
        data[80..84].copy_from_slice(&[0, 4, 1, 0]);
        data[130] = 3;
        data[257] = 1;
        data[258] = 3;
        data[512] = 0x66;
        data[513] = 0x44;
        data[516] = 2;
        data[520] = 0b1100;
        data[525] = 1;
        data[528..530].copy_from_slice(&[7, 0]);
        data[536] = 1;
        data
    }

    #[test]
    fn a_controller_is_read_from_its_offsets() {
        let parsed = IdentifyController::parse(&controller());
        assert_eq!(
            (&parsed.serial[..], &parsed.model[..], &parsed.firmware[..]),
            ("SERIAL-1", "A model", "1.0")
        );
        assert_eq!((parsed.vendor, parsed.version), (0x1b36, 0x0001_0400));
        assert_eq!(parsed.transfer_len_max(12), Some(512 << 10));
        assert_eq!(IdentifyController { mdts: 0, ..parsed.clone() }.transfer_len_max(12), None);
        assert_eq!(IdentifyController { mdts: 255, ..parsed.clone() }.transfer_len_max(12), None);
        assert!(parsed.shadow_doorbells && parsed.volatile_write_cache && parsed.sgls);
        assert!(parsed.deallocates && parsed.writes_zeroes && !parsed.compares);
        assert_eq!((parsed.aborts_max, parsed.namespaces_max, parsed.atomic_power_fail_blocks), (4, 2, 8));
        assert_eq!((parsed.sq_entry_shift_min, parsed.cq_entry_shift_min), (6, 4));
        assert_eq!(parsed.retry_delay(0), Duration::ZERO);
        assert_eq!(parsed.retry_delay(2), Duration::from_millis(300));
    }

    fn namespace(last: u8, chosen: u8) -> Vec<u8> {
        let mut data = vec![0; 4096];
        data[..8].copy_from_slice(&(1u64 << 40).to_le_bytes());
        (data[24], data[25], data[26]) = (2, last, chosen);
        data[36] = 15;
        data[44] = 31;
        data[104] = 0xaa;
        data[128..132].copy_from_slice(&[0, 0, 9, 0]);
        data[132..136].copy_from_slice(&[8, 0, 12, 1]);
        data[128 + 4 * 17 + 2] = 12;
        data
    }

    #[test]
    fn a_namespace_is_read_from_its_offsets() {
        let parsed = IdentifyNamespace::parse(&namespace(1, 0)).unwrap();
        assert_eq!((parsed.blocks, parsed.lba_shift, parsed.metadata_len), (1 << 40, 9, 0));
        assert_eq!(parsed.atomic_power_fail_blocks, Some(16));
        assert_eq!(parsed.atomic_boundary_blocks, Some(32));
        assert_eq!(parsed.nguid[0], 0xaa);
        let parsed = IdentifyNamespace::parse(&namespace(1, 1)).unwrap();
        assert_eq!((parsed.lba_shift, parsed.metadata_len), (12, 8));
        assert_eq!(IdentifyNamespace::parse(&namespace(1, 2)), None);
        assert_eq!(IdentifyNamespace::parse(&namespace(17, 0x21)).unwrap().lba_shift, 12);
    }

    #[test]
    fn a_list_ends_at_zero() {
        let list: Vec<u8> = [1u32, 5, 9, 0, 7].iter().flat_map(|nsid| nsid.to_le_bytes()).collect();
        assert_eq!(namespace_list(&list, 100), [1, 5, 9]);
        assert_eq!(namespace_list(&list, 2), [1, 5]);
        assert_eq!(write_zeroes_len_max(&[0, 8], 12), Some(1 << 20));
        assert_eq!(write_zeroes_len_max(&[0, 0], 12), None);
        assert_eq!(write_zeroes_len_max(&[0, 255], 12), None);
    }

    proptest::proptest! {
        #[test]
        fn any_bytes_are_identify_data(data: Vec<u8>, shift: u32) {
            let controller = IdentifyController::parse(&data);
            let _ = controller.transfer_len_max(shift);
            let _ = (0..=255).map(|crd| controller.retry_delay(crd)).max();
            let _ = IdentifyNamespace::parse(&data);
            let _ = namespace_list(&data, 1024);
            let _ = write_zeroes_len_max(&data, shift);
        }
    }
}
