//! What a program prints and ends with.

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ExitError {
    /// For standard error.
    pub text: String,
    pub status: u8,
}

impl ExitError {
    /// It could not start: a flag is wrong, or something that it needs is missing.
    pub(crate) fn start(text: impl Into<String>) -> Self {
        Self { text: text.into(), status: 2 }
    }

    /// It could not start because of this error.
    pub(crate) fn refused(error: impl std::fmt::Display) -> Self {
        Self::start(format!("error: {error}"))
    }

    /// It started and failed.
    pub(crate) fn failed(text: impl Into<String>) -> Self {
        Self { text: text.into(), status: 1 }
    }
}

/// What a program prints on standard output.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct ExitOutput {
    pub text: String,
    pub status: u8,
}

impl From<String> for ExitOutput {
    fn from(text: String) -> Self {
        Self { text, status: 0 }
    }
}
