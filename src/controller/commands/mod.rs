//! The commands that report and end: `audit` and `adopt`. They need no lease: what they write has its own
//! precondition, or does no harm if two do it.

pub mod adopt;
pub mod list_once;

use crate::cluster::api::client::ApiError;
use crate::cluster::protocol::apply::NoObserver;
use crate::controller::cilium_config::CiliumConfig;
use crate::controller::duties::drift;
use crate::controller::flags::{AdoptOptions, ControllerSettings, OutputFormat};
use crate::controller::writer::Writer;
use crate::policy::drift::audit as compare;
use crate::runtime::client::connect;
use crate::runtime::exit::{ExitError, ExitOutput};
use crate::runtime::signals::ShutdownSignal;
use adopt::AdoptRequest;
use list_once::list_cluster;

/// Prints every finding; status 1 if there is one.
pub async fn audit(settings: &ControllerSettings, output: OutputFormat) -> Result<ExitOutput, ExitError> {
    let writer = writer(settings).await?;
    let config = CiliumConfig::read(&writer, settings).await;
    let (index, skipped) = list_cluster(&writer).await.map_err(|error| unable(&error))?;
    for unreadable in &skipped {
        tracing::warn!("{unreadable}");
    }
    let found = compare(&drift::cluster_ranges(&index, &config));
    let text = match output {
        OutputFormat::Text => drift::as_text(&found, &config),
        OutputFormat::Json => drift::as_json(&found, &config),
    };
    Ok(ExitOutput { text, status: u8::from(!found.is_empty()) })
}

/// Plans, writes or follows an adoption; status 1 if something is in the way.
pub async fn adopt(settings: &ControllerSettings, adoption: &AdoptOptions) -> Result<ExitOutput, ExitError> {
    let writer = writer(settings).await?;
    let order = AdoptRequest { apply: adoption.apply, back: adoption.back, free: adoption.free };
    let mut report = adopt::adopt(&writer, settings, order).await.map_err(|error| unable(&error))?;
    if adoption.follow && report.clear {
        for line in report.text.lines() {
            tracing::info!("{line}");
        }
        let mut shutdown = ShutdownSignal::listen()
            .map_err(|error| ExitError::start(format!("cannot listen for signals: {error}")))?;
        tracing::info!(
            "following: pods that start are added to their node's pool until this process ends; stop it when \
             all agents are restarted"
        );
        tokio::select! {
            () = shutdown.received() => {}
            () = adopt::follow(&writer, settings, order) => {}
        }
        report = adopt::adopt(&writer, settings, order).await.map_err(|error| unable(&error))?;
    }
    Ok(ExitOutput { text: report.text, status: u8::from(!report.clear) })
}

async fn writer(settings: &ControllerSettings) -> Result<Writer, ExitError> {
    let connected = connect(settings.client.kubeconfig.as_deref(), |_| ()).await;
    let (client, _) = connected.map_err(|error| ExitError::start(format!("error: {error}")))?;
    let from = settings.client.origin().to_owned();
    Ok(Writer::new(client, from, Box::new(NoObserver)))
}

fn unable(error: &ApiError) -> ExitError {
    ExitError::start(format!("error: {error}"))
}
