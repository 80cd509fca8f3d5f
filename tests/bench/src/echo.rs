//! A bare actix-web server: reads a body, sends it back. No routes, no log, no headers of its own.

use std::io::{self, Write as _};

use actix_web::{App, HttpResponse, HttpServer, web};

/// How the echo server runs.
#[derive(Debug, clap::Args)]
pub(crate) struct Options {
    /// Port on 127.0.0.1; 0 takes a free one
    #[arg(long, default_value_t = 0)]
    port: u16,

    /// Threads that serve connections
    #[arg(long, default_value_t = 1)]
    threads: usize,
}

/// Serves until it is told to end.
pub(crate) fn run(options: &Options) -> anyhow::Result<()> {
    actix_web::rt::System::new().block_on(async {
        let server = HttpServer::new(|| App::new().default_service(web::to(answer)))
            .workers(options.threads)
            .bind(("127.0.0.1", options.port))?;
        for address in server.addrs() {
            writeln!(io::stdout(), "{}", address.port())?;
        }
        Ok(server.run().await?)
    })
}

async fn answer(body: web::Bytes) -> HttpResponse {
    HttpResponse::Ok().body(body)
}
