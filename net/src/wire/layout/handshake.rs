//! Layouts of the handshake and of keep-alive.

use super::{layout, zeroed};
use crate::wire::codec::DecodeError;
use crate::wire::handshake::{Hello, Identity, Ping, Refuse, RefuseReason, Role, Welcome};
use loligo_config::id::{ClusterId, CoreId, Epoch, Incarnation, OsdId, SessionId};
use loligo_config::map::AuthMode;
use std::mem::{offset_of, size_of};
use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

const ROLE_OSD: u16 = 1;
const ROLE_MON: u16 = 2;
const ROLE_CLIENT: u16 = 3;
const AUTH_NONE: u16 = 0;

layout! {
    /// A role and its id.
    RoleLayout(16) { role: U16, reserved: [u8; 6], id: U64, }
}

impl From<Role> for RoleLayout {
    fn from(role: Role) -> Self {
        let (role, id) = match role {
            Role::Osd(osd) => (ROLE_OSD, u64::from(osd.0)),
            Role::Mon => (ROLE_MON, 0),
            Role::Client(session) => (ROLE_CLIENT, session.0),
        };
        Self { role: role.into(), id: id.into(), ..zeroed() }
    }
}

impl TryFrom<RoleLayout> for Role {
    type Error = DecodeError;

    fn try_from(role: RoleLayout) -> Result<Self, DecodeError> {
        let id = role.id.get();
        match role.role.get() {
            ROLE_OSD => Ok(Role::Osd(OsdId(u32::try_from(id).map_err(|_| DecodeError::Value("OSD id"))?))),
            ROLE_MON => Ok(Role::Mon),
            ROLE_CLIENT => Ok(Role::Client(SessionId(id))),
            _ => Err(DecodeError::Value("role")),
        }
    }
}

layout! {
    /// Who a process is.
    IdentityLayout(48) { cluster: [u8; 16], role: RoleLayout, incarnation: U64, has_cluster: u8, reserved: [u8; 7], }
}

impl From<Identity> for IdentityLayout {
    fn from(identity: Identity) -> Self {
        Self {
            cluster: identity.cluster.map_or([0; 16], |cluster| cluster.0.into_bytes()),
            role: identity.role.into(),
            incarnation: identity.incarnation.0.into(),
            has_cluster: u8::from(identity.cluster.is_some()),
            ..zeroed()
        }
    }
}

impl TryFrom<IdentityLayout> for Identity {
    type Error = DecodeError;

    fn try_from(identity: IdentityLayout) -> Result<Self, DecodeError> {
        let cluster = ClusterId(uuid::Uuid::from_bytes(identity.cluster));
        Ok(Self {
            cluster: super::flag(identity.has_cluster)?.then_some(cluster),
            role: identity.role.try_into()?,
            incarnation: Incarnation(identity.incarnation.get()),
        })
    }
}

fn auth_number(auth: AuthMode) -> U16 {
    match auth {
        AuthMode::None => AUTH_NONE.into(),
    }
}

fn auth_mode(number: U16) -> Result<AuthMode, DecodeError> {
    match number.get() {
        AUTH_NONE => Ok(AuthMode::None),
        _ => Err(DecodeError::UnknownAuth),
    }
}

layout! {
    /// `Hello`.
    HelloLayout(128) {
        version: U16,
        version_min: U16,
        auth: U16,
        core: U16,
        features: U64,
        features_required: U64,
        identity: IdentityLayout,
        expected: RoleLayout,
        nonce: U64,
        reserved: [u8; 32],
    }
}
const _: () = assert!(offset_of!(HelloLayout, auth) == 4);
const _: () = assert!(offset_of!(HelloLayout, identity) == 24);
const _: () = assert!(offset_of!(HelloLayout, nonce) == 88);

impl From<&Hello> for HelloLayout {
    fn from(hello: &Hello) -> Self {
        Self {
            version: hello.version.into(),
            version_min: hello.version_min.into(),
            auth: auth_number(hello.auth),
            core: hello.core.0.into(),
            features: hello.features.into(),
            features_required: hello.features_required.into(),
            identity: hello.identity.into(),
            expected: hello.expected.into(),
            nonce: hello.nonce.into(),
            ..zeroed()
        }
    }
}

impl TryFrom<&HelloLayout> for Hello {
    type Error = DecodeError;

    fn try_from(hello: &HelloLayout) -> Result<Self, DecodeError> {
        Ok(Self {
            version: hello.version.get(),
            version_min: hello.version_min.get(),
            features: hello.features.get(),
            features_required: hello.features_required.get(),
            identity: hello.identity.try_into()?,
            expected: hello.expected.try_into()?,
            core: CoreId(hello.core.get()),
            auth: auth_mode(hello.auth)?,
            nonce: hello.nonce.get(),
        })
    }
}

layout! {
    /// `Welcome`.
    WelcomeLayout(128) {
        version: U16,
        core: U16,
        auth: U16,
        reserved_16: U16,
        credits: U32,
        reserved_32: U32,
        features: U64,
        identity: IdentityLayout,
        session: U64,
        nonce_echo: U64,
        nonce: U64,
        reserved: [u8; 32],
    }
}
const _: () = assert!(offset_of!(WelcomeLayout, credits) == 8);
const _: () = assert!(offset_of!(WelcomeLayout, identity) == 24);
const _: () = assert!(offset_of!(WelcomeLayout, nonce) == 88);

impl From<&Welcome> for WelcomeLayout {
    fn from(welcome: &Welcome) -> Self {
        Self {
            version: welcome.version.into(),
            core: welcome.core.0.into(),
            auth: auth_number(welcome.auth),
            credits: welcome.credits.into(),
            features: welcome.features.into(),
            identity: welcome.identity.into(),
            session: welcome.session.0.into(),
            nonce_echo: welcome.nonce_echo.into(),
            nonce: welcome.nonce.into(),
            ..zeroed()
        }
    }
}

impl TryFrom<&WelcomeLayout> for Welcome {
    type Error = DecodeError;

    fn try_from(welcome: &WelcomeLayout) -> Result<Self, DecodeError> {
        Ok(Self {
            version: welcome.version.get(),
            features: welcome.features.get(),
            identity: welcome.identity.try_into()?,
            core: CoreId(welcome.core.get()),
            session: SessionId(welcome.session.get()),
            credits: welcome.credits.get(),
            auth: auth_mode(welcome.auth)?,
            nonce_echo: welcome.nonce_echo.get(),
            nonce: welcome.nonce.get(),
        })
    }
}

layout! {
    /// `Refuse`.
    RefuseLayout(8) { reason: U16, reserved: U16, epoch: U32, }
}

impl From<&Refuse> for RefuseLayout {
    fn from(refuse: &Refuse) -> Self {
        Self { reason: (refuse.reason as u16).into(), epoch: refuse.epoch.0.into(), ..zeroed() }
    }
}

impl TryFrom<&RefuseLayout> for Refuse {
    type Error = DecodeError;

    fn try_from(refuse: &RefuseLayout) -> Result<Self, DecodeError> {
        let reason = match refuse.reason.get() {
            1 => RefuseReason::Version,
            2 => RefuseReason::Feature,
            3 => RefuseReason::Cluster,
            4 => RefuseReason::Identity,
            5 => RefuseReason::Auth,
            6 => RefuseReason::Busy,
            7 => RefuseReason::Fenced,
            8 => RefuseReason::Stale,
            _ => return Err(DecodeError::Value("reason of a refusal")),
        };
        Ok(Self { reason, epoch: Epoch(refuse.epoch.get()) })
    }
}

layout! {
    /// `Ping` and `Pong`.
    PingLayout(8) { number: U64, }
}

impl From<&Ping> for PingLayout {
    fn from(ping: &Ping) -> Self {
        Self { number: ping.number.into() }
    }
}

impl TryFrom<&PingLayout> for Ping {
    type Error = DecodeError;

    fn try_from(ping: &PingLayout) -> Result<Self, DecodeError> {
        Ok(Self { number: ping.number.get() })
    }
}
