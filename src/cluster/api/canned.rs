//! An API server of canned answers, by which a test sees what is asked. Must never decide anything.

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::sync::{Arc, Mutex};

use kube::client::Body;
use serde_json::{Value, json};

/// Its answers by path, and what it was asked.
#[derive(Debug, Default)]
pub(crate) struct Canned {
    answers: Mutex<BTreeMap<String, Value>>,
    asked: Mutex<Vec<String>>,
}

impl Canned {
    pub(crate) fn new() -> Arc<Self> {
        Arc::default()
    }

    /// What is answered from now on, whatever the method. All else is not found.
    pub(crate) fn answer(&self, path: &str, answer: Value) {
        self.answers.lock().unwrap().insert(path.to_owned(), answer);
    }

    pub(crate) fn forget(&self, path: &str) {
        self.answers.lock().unwrap().remove(path);
    }

    /// Method and path of every request since the last look.
    pub(crate) fn asked(&self) -> Vec<String> {
        std::mem::take(&mut *self.asked.lock().unwrap())
    }

    pub(crate) fn client(self: &Arc<Self>) -> kube::Client {
        let server = self.clone();
        let service = tower::service_fn(move |request: http::Request<Body>| {
            let path = request.uri().path().to_owned();
            server.asked.lock().unwrap().push(format!("{} {path}", request.method()));
            let found = server.answers.lock().unwrap().get(&path).cloned();
            let status = if found.is_some() { 200 } else { 404 };
            let missing = json!({"apiVersion": "v1", "kind": "Status", "status": "Failure", "reason": "NotFound",
                                 "message": "not found", "code": 404});
            let body = Body::from(found.unwrap_or(missing).to_string().into_bytes());
            let answer = http::Response::builder().status(status).body(body).unwrap();
            async move { Ok::<_, Infallible>(answer) }
        });
        kube::Client::new(service, "default")
    }
}
