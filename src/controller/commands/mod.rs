//! The commands that report and end: `audit` and `adopt`. They need no lease: what they write has its own
//! precondition, or does no harm if two do it.

pub mod adopt;
pub mod list_once;

use crate::cluster::writer::apply::NoObserver;
use crate::controller::flags::{AdoptOptions, ControllerSettings, OutputFormat};
use crate::controller::{
    cilium_config::CiliumConfig, duties::drift, installation::Installation, writer::Writer,
};
use crate::runtime::exit::{ExitError, ExitOutput};
use crate::runtime::{client::connect_as_kubectl, signals::ShutdownSignal};
use list_once::list_cluster;

/// Prints every finding; status 1 if there is one.
pub async fn audit(settings: &ControllerSettings, output: OutputFormat) -> Result<ExitOutput, ExitError> {
    let writer = writer(settings).await?;
    let config = CiliumConfig::read(&writer, settings).await;
    let (index, skipped) = list_cluster(&writer).await.map_err(ExitError::refused)?;
    for unreadable in &skipped {
        tracing::warn!("{unreadable}");
    }
    let installation = Installation::read(&writer, &config).await;
    let report = drift::AuditReport::of(&index, &config, &installation);
    let text = match output {
        OutputFormat::Text => drift::as_text(&report),
        OutputFormat::Json => drift::as_json(&report),
    };
    Ok(ExitOutput { text, status: u8::from(!report.is_clear()) })
}

/// Plans, writes or follows an adoption; status 1 if something is in the way.
pub async fn adopt(settings: &ControllerSettings, options: AdoptOptions) -> Result<ExitOutput, ExitError> {
    let writer = writer(settings).await?;
    let mut report = adopt::adopt(&writer, settings, options.clone()).await.map_err(ExitError::refused)?;
    if options.follow && report.clear {
        for line in report.text.lines() {
            tracing::info!("{line}");
        }
        let mut shutdown = ShutdownSignal::listen()?;
        tracing::info!(
            "following: pods that start are added to their node's pool until this process ends; stop it when \
             all agents are restarted"
        );
        tokio::select! {
            () = shutdown.received() => {}
            () = adopt::follow(self::writer(settings).await?, settings.clone()) => {}
        }
        report = adopt::adopt(&writer, settings, options).await.map_err(ExitError::refused)?;
    }
    Ok(ExitOutput { text: report.text, status: u8::from(!report.clear) })
}

async fn writer(settings: &ControllerSettings) -> Result<Writer, ExitError> {
    let connected = connect_as_kubectl(settings.client.kubeconfig.as_deref(), |_| ()).await;
    let (client, _) = connected.map_err(ExitError::refused)?;
    Ok(Writer::new(client, settings.client.origin().to_owned(), Box::new(NoObserver)))
}
