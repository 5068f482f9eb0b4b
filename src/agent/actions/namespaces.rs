//! The namespaces of the pods that one step decides about. Must never be kept for the next step.

use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};

/// The annotations of namespaces as they were read, live, in one step of the agent. The pods that a step
/// decides about were seen before it, so one read is live for all of them.
#[derive(Default)]
pub struct NamespaceReads(Mutex<BTreeMap<String, BTreeMap<String, String>>>);

impl NamespaceReads {
    pub(super) fn get(&self, name: &str) -> Option<BTreeMap<String, String>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).get(name).cloned()
    }

    pub(super) fn keep(&self, name: &str, annotations: &BTreeMap<String, String>) {
        let mut reads = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        reads.insert(name.to_owned(), annotations.clone());
    }
}
