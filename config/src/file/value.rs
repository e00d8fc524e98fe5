//! Networks in CIDR notation.

use std::fmt;
use std::net::IpAddr;
use std::str::FromStr;

/// A network: an address and how many of its leading bits count.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cidr {
    address: IpAddr,
    prefix: u8,
}

impl Cidr {
    /// Whether the address is in the network.
    pub fn contains(&self, address: IpAddr) -> bool {
        match (self.address, address) {
            (IpAddr::V4(net), IpAddr::V4(ip)) => {
                let shift = 32 - u32::from(self.prefix);
                (u32::from(net) ^ u32::from(ip)).checked_shr(shift).unwrap_or(0) == 0
            }
            (IpAddr::V6(net), IpAddr::V6(ip)) => {
                let shift = 128 - u32::from(self.prefix);
                (u128::from(net) ^ u128::from(ip)).checked_shr(shift).unwrap_or(0) == 0
            }
            _ => false,
        }
    }
}

impl FromStr for Cidr {
    type Err = ();

    fn from_str(text: &str) -> Result<Self, ()> {
        let (address, prefix) = text.split_once('/').ok_or(())?;
        let address: IpAddr = address.parse().map_err(drop)?;
        let prefix: u8 = prefix.parse().map_err(drop)?;
        let prefix_max = if address.is_ipv4() { 32 } else { 128 };
        if prefix > prefix_max { Err(()) } else { Ok(Self { address, prefix }) }
    }
}

impl fmt::Display for Cidr {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.address, self.prefix)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn networks_hold_what_shares_their_prefix() {
        let net: Cidr = "10.1.0.0/16".parse().unwrap();
        assert!(net.contains("10.1.255.255".parse().unwrap()));
        assert!(!net.contains("10.2.0.0".parse().unwrap()));
        assert!(!net.contains("::1".parse().unwrap()));
        let all: Cidr = "0.0.0.0/0".parse().unwrap();
        assert!(all.contains("255.255.255.255".parse().unwrap()));
        let one: Cidr = "fe80::1/128".parse().unwrap();
        assert!(one.contains("fe80::1".parse().unwrap()));
        assert!(!one.contains("fe80::2".parse().unwrap()));
        for wrong in ["10.0.0.0", "10.0.0.0/33", "::/129", "x/8", "/", ""] {
            assert!(wrong.parse::<Cidr>().is_err(), "{wrong}");
        }
    }
}
