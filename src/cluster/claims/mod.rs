//! The claim protocol.
